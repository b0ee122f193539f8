"""Fused-layer interface of weights as stored: activation schemes and packed weights.

Activations are in the column order of `tiles.arrange`.
"""

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

#: Columns of a k-loop step, and of a short one. Short steps are for columns with separate groups, and for float32
#: products, which no tensor core computes.
STEP, SHORT_STEP = 128, 32
#: Columns that share a scale of MXFP8.
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
    """Return the activation scheme for weights as stored.

    Args:
        key: Quantization key of the activations; None for 16-bit activations.
        bits: Bits per weight code; None if the weights keep their column order.
        dtype: Dtype of the layer.
        scaled: Whether the tensor cores multiply e4m3 codes with e8m0 scale bytes, for MXFP8.
        pre_scaled: Whether columns of x and h have ``pre_scales``.
        pre_scales: float32 [E, columns] of x and h, or None.
        static: Scales [E] of x and h, for e4m3 with a scale per expert.

    Returns:
        The activation scheme.

    Raises:
        ConfigError: The key is not supported.
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
        # Otherwise router weights change more than the scales. They then multiply x before it is rounded.
        keeps_range=key is None or block,
    )


def activation_functions(key: QuantKey | None) -> tuple[Any, Any]:
    """Return `open_a` and `load_a` of the tile kernel for an activation key.

    Args:
        key: Quantization key of the activations; None for 16-bit activations.

    Returns:
        The two device functions.
    """
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
    """Return a weight of packed words, with low bits first.

    Args:
        words: int32 or uint8 [E, rows of all halves, words].
        bits: Bits per code.
        rows: Rows of one half.
        columns: Number of codes per row.
        scales: For `open_groups`: [E, groups, rows of all halves].
        functions: Functions of the tile kernel.
        others: Zero points in the shape of ``scales``, or [E, rows of all halves]; or None.
        column_groups: [E, columns padded to whole steps], the group of each column; or None.
        bias: [E, rows of all halves], or None.
        step: Columns of a k-loop step.

    Returns:
        The weight.
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
