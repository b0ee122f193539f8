"""Activations that are quantized and dequantized (QDQ), for GEMMs with 16-bit operands.

The result is codes times scales of an activation key, in bfloat16. It suits tensor cores that lack the codes' type, and
kernels whose weights become 16-bit values. Codes of e4m3, e2m1 and int8 are exact in bfloat16. A code times its float32
scale is rounded to bfloat16, by 2^-8 at most. In the root mean square that is a sixteenth of the error of e4m3, and a
fifth of the error of int8. For the largest codes it is as large as the quantization error.

`quantize` functions have the form of the tile kernel and take whole rows: quant_args = (values, codes, ...). ``codes``
is a tensor of the codes' dtype: int8, or that of the values for e4m3 without hardware support.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_core.errors import ConfigError
from moe_core.kernels.device.casts import downcast
from moe_core.kernels.device.specialize import specialize
from moe_core.kernels.gemm.as_stored.activations import round_mx
from moe_core.kernels.gemm.fused.plain import RowQuantizer
from moe_core.kernels.gemm.tiles.scaled_mm import quantize_group, quantize_row, quantize_static
from moe_core.spec.numerics import INT8
from moe_core.spec.quant_key import (
    QuantKey,
    kFp8Dynamic64Sym,
    kFp8Dynamic128Sym,
    kFp8DynamicTokenSym,
    kFp8StaticTensorSym,
    kInt8DynamicTokenSym,
    kMxfp4Dynamic,
    kMxfp8Dynamic,
)

# Set by `specialize`: the function that produces codes, and the columns that share a scale.
quantize: Any = quantize_row
GROUP = tl.constexpr(128)


@triton.jit
def qdq_rows(tile, quant_args, expert, AXIS: tl.constexpr):
    """QDQ of a tile whose whole AXIS is a row."""
    codes, scale = quantize(tile, quant_args[1:], expert, AXIS)
    return downcast(codes.to(tl.float32) * tl.expand_dims(scale, AXIS), quant_args[0].dtype.element_ty), 0.0


@triton.jit
def qdq_groups(tile, quant_args, expert, AXIS: tl.constexpr):
    """QDQ of a tile whose columns (dimension 1) share a scale in groups of GROUP."""
    tl.static_assert(AXIS == 1, "rows are quantized as they lie")
    groups = tile.reshape([tile.shape[0] * (tile.shape[1] // GROUP), GROUP])
    values, _ = qdq_rows(groups, quant_args, expert, 1)
    return values.reshape(tile.shape), 0.0


#: Columns that share a float32 scale; -1 for the whole row.
_COLUMNS = {kFp8DynamicTokenSym: -1, kInt8DynamicTokenSym: -1, kFp8Dynamic128Sym: 128, kFp8Dynamic64Sym: 64}


@cache
def _device_function(key: QuantKey) -> Any:
    if key == kFp8StaticTensorSym:
        return specialize(qdq_rows, quantize=quantize_static)
    if key in _COLUMNS:
        columns = _COLUMNS[key]
        in_groups = specialize(qdq_rows, quantize=quantize_group)
        return qdq_rows if columns == -1 else specialize(qdq_groups, qdq_rows=in_groups, GROUP=columns)
    if key.with_rounding("up") in (kMxfp8Dynamic, kMxfp4Dynamic):
        return specialize(round_mx, CODE=key.dtype.name, ROUNDING=key.scale.rounding)
    raise ConfigError(
        f"activation_key {key} is not supported; expected e4m3 per token, per 64 or 128 columns or static, int8 per "
        "token, MXFP8 or MXFP4"
    )


def qdq(
    key: QuantKey,
    device: torch.device | None = None,
    static: tuple[Tensor | None, Tensor | None] = (None, None),
) -> RowQuantizer:
    """Return the row quantizer that performs QDQ by ``key``.

    Args:
        key: Quantization key of the activations.
        device: Device of the layer; None if only workspaces are queried.
        static: float32 scales [E] of x and h, for static keys.

    Returns:
        The row quantizer; it stores bfloat16.

    Raises:
        ConfigError: The key is not supported.
    """
    codes: tuple[Tensor, ...] = ()
    if device is not None:
        # Only its dtype is read.
        codes = (torch.empty(0, dtype=torch.int8 if key.dtype == INT8 else torch.bfloat16, device=device),)
    x, h = ((*codes, scale) if key.is_static else codes for scale in static)
    exact = key.scale.dtype is torch.float32 and not key.is_static
    return RowQuantizer(_device_function(key), torch.bfloat16, x, h, by_expert=key.is_static, keeps_range=exact)
