"""What weights as stored give the fused layer: activations in the order of `tiles.arrange`, and a weight's words."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_core.errors import TensorError
from moe_core.gemm.as_stored import activations
from moe_core.gemm.as_stored.kinds import ActivationKind
from moe_core.gemm.fused.groups import GroupScheme
from moe_core.gemm.fused.pre_scaled import PreScaledScheme
from moe_core.gemm.fused.scaled_mm_weight import packed_descriptor
from moe_core.gemm.fused.scheme import ActivationScheme
from moe_core.gemm.launch import GemmWeight, TileFunctions, is_aligned

#: depth of a step of the k loop, and columns that a step of MXFP8 scales spans
STEP, UNIT = 128, 32

_QUANTIZE = {
    ActivationKind.TOKEN: activations.round_4,
    ActivationKind.BLOCK: activations.round_4,
    ActivationKind.EXPERT: activations.round_static_4,
    ActivationKind.MXFP8: activations.round_mxfp8_4,
    ActivationKind.MXFP4: activations.round_mxfp4_4,
    ActivationKind.MXFP4_EVEN: activations.round_mxfp4_even_4,
    ActivationKind.MXFP4_DOWN: activations.round_mxfp4_down_4,
    ActivationKind.MXFP8_EVEN: activations.round_mxfp8_even_4,
    ActivationKind.MXFP8_DOWN: activations.round_mxfp8_down_4,
}


def quantizer(kind: ActivationKind, bits: int) -> Any:
    """The `quantize` function of a kind, beside codes of so many bits."""
    if kind is ActivationKind.PLAIN:
        return activations.arrange_4 if bits == 4 else activations.arrange_8
    if bits != 4:
        raise TensorError(f"quantised activations go with codes of 4 bits, got {bits}")
    return _QUANTIZE[kind]


def as_stored_scheme(
    kind: ActivationKind,
    bits: int,
    dtype: torch.dtype,
    *,
    scaled: bool = False,
    pre_scaled: bool = False,
    pre_scales: tuple[Tensor | None, Tensor | None] = (None, None),
    static: tuple[Tensor | None, Tensor | None] = (None, None),
) -> ActivationScheme:
    """Activations of ``kind`` beside codes of ``bits``, in a layer of ``dtype``.

    ``scaled``: the tensor cores multiply e4m3 codes with e8m0 bytes, for kind MXFP8; ``pre_scaled``: columns of x and
    h have ``pre_scales`` float32 [E, columns]; ``static`` scales [E] of x and h, for kind EXPERT.
    """
    if scaled:
        e4m3, e8m0 = torch.float8_e4m3fn, torch.uint8
        return GroupScheme(
            activations.code_mxfp8,
            e4m3,
            UNIT,
            scale_dtype=e8m0,
            scale_group=UNIT,
            takes_values=True,
            keeps_range=False,
        )
    quantize, stored = quantizer(kind, bits), dtype if kind is ActivationKind.PLAIN else torch.bfloat16
    by_token = kind is ActivationKind.TOKEN
    if by_token or pre_scaled:
        return PreScaledScheme(quantize, stored, by_token, pre_scaled, *pre_scales)
    block = kind is ActivationKind.BLOCK
    return GroupScheme(
        quantize,
        stored,
        STEP if block else UNIT,
        scale_dtype=torch.float32 if block else None,
        takes_values=True,
        static=kind is ActivationKind.EXPERT,
        x_scale=static[0],
        h_scale=static[1],
        keeps_range=not kind.weighted_first,
    )


def packed_weight(
    words: Tensor,
    bits: int,
    rows: int,
    columns: int,
    arguments: tuple[Any, ...],
    functions: TileFunctions,
    *,
    bias: Tensor | None = None,
    step: int = STEP,
) -> GemmWeight:
    """A weight of ``words`` int32 or uint8 [E, rows of all halves, words]: ``columns`` codes of ``bits``.

    Low bits come first; ``rows`` of one half; ``step`` columns of a step of the k loop.
    """
    return GemmWeight(
        arguments,
        rows,
        columns,
        lambda config, a: functions,
        step,
        bias,
        packed_descriptor(words, 8 * words.element_size() // bits),
        is_aligned(words),
    )
