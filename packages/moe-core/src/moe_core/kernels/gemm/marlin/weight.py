"""A weight of the Marlin family, as the fused layer takes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from moe_core.errors import TensorError
from moe_core.kernels.gemm.fragments.fragment_order import STEP
from moe_core.kernels.gemm.plan import TileConfig
from moe_core.kernels.gemm.sm90.mixed_input_launch import ROWS, words_gemm
from moe_core.kernels.gemm.tiles.columns import Columns
from moe_core.kernels.gemm.tiles.launch import GemmWeight, TileFunctions, WarpSpecialisedGemm
from moe_core.kernels.gemm.tiles.operands import load_plain, open_plain


class PackedWeight(NamedTuple):
    """The tuple `b_args` of `moe_core.kernels.gemm.fragments.operand.open_groups`; `PackedWeight.of` makes it.

    ``words`` with their strides by expert, row and, where they are block-major, step; ``scales`` with theirs by expert,
    group and row, and how many ``groups`` there are (of pairs, strides of words, and how many pairs); ``others``:
    channel scales or zero points, by expert.  What has a default is for some kernels: ``powers``, see `WordFunctions`,
    and ``column_groups`` [E, columns], by expert.
    """

    words: Tensor
    scales: Tensor
    others: Tensor | None
    stride_e: int
    stride_n: int
    stride_k: int | None
    scale_e: int
    scale_g: int
    scale_n: int
    groups: int
    other_e: int
    powers: Tensor | None = None
    column_groups: Tensor | None = None
    column_e: int = 0

    @staticmethod
    def of(words: Tensor, scales: Tensor, others: Tensor | None, column_groups: Tensor | None = None) -> PackedWeight:
        """``words`` [E, rows, words] or [E, steps, rows, words of a step].

        ``scales`` [E, groups, rows] or, of 16 bits and in words of two groups', [E, pairs, rows, 2].
        """
        halves = scales.shape[3] if scales.dim() == 4 else 1
        scale_e, scale_g, scale_n = (stride // halves for stride in scales.stride()[:3])
        return PackedWeight(
            words,
            scales,
            others,
            words.stride(0),
            words.stride(-2),
            words.stride(1) if words.dim() == 4 else None,
            scale_e,
            scale_g,
            scale_n,
            scales.shape[1],
            0 if others is None else others.stride(0),
            column_groups=column_groups,
            column_e=0 if column_groups is None else column_groups.stride(0),
        )


@dataclass(frozen=True, eq=False)
class MarlinMatrix:
    """One of the two weights of a layer's experts.

    - ``words`` int32 [E, steps, rows, words of a step], see `moe_core.kernels.gemm.fragments.fragment_order`; ``bits``
      of a code
    - ``n`` columns of the result, of one half where gate and up rows are interleaved
    - ``k`` columns of x or h as the words have them; ``group_size`` of them share a scale, -1: all of a row
    - ``scales`` [E, groups, rows] float32, or int32 with zero points; or [E, pairs of groups, rows, 2] bfloat16 or
      float16 (`moe_core.kernels.gemm.fragments.operand`)
    - ``channel_scales`` float32 [E, rows]: multiply the finished sums; or None
    - ``powers`` float32 [E]: `moe_core.kernels.gemm.fragments.scales.powers_of` ``scales``; or None
    - ``bias`` [E, n], of interleaved rows [E, 2 * n]: gate, then up; any float dtype
    - ``index`` int32 [E, columns], ``pre_scales`` float32 [E, K]: see `moe_core.kernels.gemm.tiles.columns`
    """

    words: Tensor
    bits: int
    n: int
    k: int
    group_size: int
    scales: Tensor
    channel_scales: Tensor | None = None
    bias: Tensor | None = None
    interleaved: bool = False
    index: Tensor | None = None
    pre_scales: Tensor | None = None
    powers: Tensor | None = None

    def __post_init__(self) -> None:
        if self.words.dim() != 4:
            shape = list(self.words.shape)
            raise TensorError(f"words have shape {shape}, expected 4 axes: convert weights of an older version again")

    @property
    def paired(self) -> bool:
        """Whether ``scales`` are of 16 bits, two groups' side by side."""
        return self.scales.dim() == 4

    @property
    def arguments(self) -> PackedWeight:
        """The tuple `b_args` of the device functions, see `moe_core.kernels.gemm.fragments.operand`."""
        return PackedWeight.of(self.words, self.scales, self.channel_scales)

    @property
    def activation_columns(self) -> Columns:
        """How the columns of activations stand."""
        return Columns(self.k, self.index, self.pre_scales)

    def gemm_weight(self, functions: Functions, words: WordFunctions | None = None) -> GemmWeight:
        """What the tile kernel gets, with the ``functions`` of the element type.

        ``words``: those of the warp-specialised kernel, where it multiplies such a matrix.
        """
        special = None
        if words is not None:
            scales = (self.arguments._replace(powers=words.powers), words.groups)
            special = WarpSpecialisedGemm(self.words, words.dequantize, scales, STEP, words_gemm, ROWS, gathers=True)
        return GemmWeight(
            self.arguments,
            self.n,
            self.k,
            lambda config: TileFunctions(open_plain, load_plain, *functions(self, config)),
            bias=self.bias,
            whole_steps=True,
            packed=32 // self.bits,
            interleaved=self.interleaved,
            warp_specialised=special,
        )


class WordFunctions(NamedTuple):
    """What the warp-specialised kernel takes of an element type.

    ``groups`` of a step have scales of their own, 0: rows have one each.  ``dequantize`` gives a device function

        dequantize(words, scales, U, dtype) -> the eight numbers [64, 4] of `words` [64, 4], as `dequant.asm_values`

    of word U of four threads, which has the columns 32 U .. 32 U + 31 of a step
    (`moe_core.kernels.gemm.fragments.fragment_order`); `scales` are a tuple of [64], as many as there are ``groups``,
    or the one of the row.  With ``powers`` (float32 [E], see `moe_core.kernels.gemm.fragments.scales.powers_of`) they
    are multiplied by 2^126 / power before, and finished sums by power * 2^7.
    """

    groups: int
    dequantize: Callable[[], Any]
    powers: Tensor | None = None


#: the tile kernel's open_b, load_b, multiply and scale_acc for a matrix and a tile
Functions = Callable[[MarlinMatrix, TileConfig], tuple[Any, Any, Any, Any]]
