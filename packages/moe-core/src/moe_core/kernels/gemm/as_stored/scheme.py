"""What weights as stored give the fused layer: activations in the order of `tiles.arrange`, and a weight's words."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_core.kernels.gemm.as_stored import tiles
from moe_core.kernels.gemm.as_stored.activations import code_mxfp8, quantizer
from moe_core.kernels.gemm.fused.groups import GroupScheme
from moe_core.kernels.gemm.fused.plain import PlainScheme, RowQuantizer
from moe_core.kernels.gemm.fused.scaled_mm import ScaledMMFunctions, ScaledMMScheme
from moe_core.kernels.gemm.fused.scheme import ActivationScheme
from moe_core.kernels.gemm.marlin.weight import PackedWeight
from moe_core.kernels.gemm.tiles.columns import Columns
from moe_core.kernels.gemm.tiles.launch import GemmWeight, TileFunctions
from moe_core.kernels.gemm.tiles.operands import load_values, open_plain
from moe_core.kernels.gemm.tiles.scaled_mm import open_values
from moe_core.spec.quant_key import QuantKey, kFp8Dynamic128Sym, kFp8DynamicTokenSym, kFp8StaticTensorSym

#: depth of a step of the k loop; of a short one, where columns have groups of their own, and for float32 products,
#: which no tensor core computes
STEP, SHORT_STEP = 128, 32
#: columns that a scale of MXFP8 spans
UNIT = 32


def as_stored_scheme(
    key: QuantKey | None,
    bits: int | None,
    dtype: torch.dtype,
    *,
    scaled: bool = False,
    pre_scaled: bool = False,
    pre_scales: tuple[Tensor | None, Tensor | None] = (None, None),
    static: tuple[Tensor | None, Tensor | None] = (None, None),
) -> ActivationScheme:
    """Activations of ``key`` (None: 16-bit) beside codes of ``bits``, in a layer of ``dtype``.

    ``bits`` None: weights have their columns in order.  ``scaled``: the tensor cores multiply e4m3 codes with e8m0
    bytes, for MXFP8; ``pre_scaled``: columns of x and h have ``pre_scales`` float32 [E, columns]; ``static`` scales [E]
    of x and h, for e4m3 with a scale per expert.  Raises ConfigError for other keys.
    """
    if scaled:
        e4m3, e8m0 = torch.float8_e4m3fn, torch.uint8
        return GroupScheme(code_mxfp8, e4m3, UNIT, scale_dtype=e8m0, keeps_range=False)
    quantize, stored = quantizer(key, bits), dtype if key is None else torch.bfloat16
    by_token, by_expert, block = (key == k for k in (kFp8DynamicTokenSym, kFp8StaticTensorSym, kFp8Dynamic128Sym))
    if pre_scaled:
        x, h = (Columns(0 if each is None else each.shape[1], None, each) for each in pre_scales)
        return PlainScheme(x, h, True, RowQuantizer(quantize, stored, stores_scales=by_token))
    if by_token or by_expert:
        functions = ScaledMMFunctions(
            stored, quantize_row=quantize, quantize_static=quantize, load_unquantized=None, packed=0
        )
        return ScaledMMScheme(functions, "static" if by_expert else "token", *static)
    return GroupScheme(
        quantize,
        stored,
        STEP if block else UNIT,
        scale_dtype=torch.float32 if block else None,
        # router weights change more than scales otherwise, and multiply x before it is rounded
        keeps_range=key is None or block,
    )


def activation_functions(key: QuantKey | None) -> tuple[Any, Any]:
    """open_a and load_a of the tile kernel for activations of ``key``."""
    if key == kFp8Dynamic128Sym:
        return tiles.open_blocks, tiles.load_blocks
    return open_values if key in (kFp8DynamicTokenSym, kFp8StaticTensorSym) else open_plain, load_values


def packed_weight(
    words: Tensor,
    bits: int,
    rows: int,
    columns: int,
    scales: Tensor,
    functions: TileFunctions,
    *,
    others: Tensor | None = None,
    column_groups: Tensor | None = None,
    bias: Tensor | None = None,
    step: int = STEP,
) -> GemmWeight:
    """A weight of ``words`` int32 or uint8 [E, rows of all halves, words]: ``columns`` codes of ``bits``.

    Low bits come first; ``rows`` of one half; ``step`` columns of a step of the k loop.  For `open_groups`:
    ``scales`` [E, groups, rows of all halves]; ``others``: of that shape, or [E, rows of all halves].
    ``column_groups`` [E, columns padded to whole steps]: the group of each column.
    """
    return GemmWeight(
        PackedWeight.of(words, scales, others, column_groups),
        rows,
        columns,
        lambda config: functions,
        step,
        bias,
        8 * words.element_size() // bits,
    )
