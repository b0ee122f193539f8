"""A weight of the Marlin family, in the form of the fused layer."""

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
from moe_core.kernels.gemm.tiles.launch import GemmWeight, TileFunctions, WarpSpecializedGemm
from moe_core.kernels.gemm.tiles.operands import load_plain, open_plain


class PackedWeight(NamedTuple):
    """The tuple `b_args` of `moe_core.kernels.gemm.fragments.operand.open_groups`.

    `PackedWeight.of` builds it. Fields with a default are for some kernels only.

    Attributes:
        words: Words of all experts.
        scales: Scales of all experts.
        others: Channel scales or zero points, by expert; or None.
        stride_e: Expert stride of ``words``.
        stride_n: Row stride of ``words``.
        stride_k: Step stride of block-major ``words``, otherwise None.
        scale_e: Expert stride of ``scales``; strides of paired scales count words.
        scale_g: Group stride of ``scales`` (paired scales: of pairs).
        scale_n: Row stride of ``scales``.
        groups: Number of groups (paired scales: of pairs).
        other_e: Expert stride of ``others``.
        powers: float32 [E], see `WordFunctions`; or None.
        column_groups: [E, columns], the group of each column; or None.
        column_e: Expert stride of ``column_groups``.
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
        """Build the arguments from tensors.

        Args:
            words: [E, rows, words], or [E, steps, rows, words of a step].
            scales: [E, groups, rows]; or, of 16 bits with two groups per word, [E, pairs, rows, 2].
            others: Channel scales or zero points, by expert; or None.
            column_groups: [E, columns], or None.

        Returns:
            The arguments.
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

    Attributes:
        words: int32 [E, steps, rows, words of a step], see `moe_core.kernels.gemm.fragments.fragment_order`.
        bits: Bits per code.
        n: Columns of the result, of one half if gate and up rows are interleaved.
        k: Columns of x or h as ordered in the words.
        group_size: Columns that share a scale; -1 for the whole row.
        scales: [E, groups, rows] float32, or int32 with zero points; or [E, pairs of groups, rows, 2] bfloat16 or
            float16 (`moe_core.kernels.gemm.fragments.operand`).
        channel_scales: float32 [E, rows] that multiply the finished sums, or None.
        bias: [E, n], of interleaved rows [E, 2 * n] with gate followed by up; any float dtype; or None.
        interleaved: Whether gate and up rows are interleaved.
        index: int32 [E, columns], see `moe_core.kernels.gemm.tiles.columns`; or None.
        pre_scales: float32 [E, K], see `moe_core.kernels.gemm.tiles.columns`; or None.
        powers: float32 [E], `moe_core.kernels.gemm.fragments.scales.powers_of` the ``scales``; or None.

    Raises:
        TensorError: The words do not have four dimensions.
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
            raise TensorError(
                f"packed weights have shape {shape}, expected 4 axes: convert the weights again with this version"
            )

    @property
    def paired(self) -> bool:
        """Whether ``scales`` are 16-bit, with those of two groups adjacent."""
        return self.scales.dim() == 4

    @property
    def arguments(self) -> PackedWeight:
        """The tuple `b_args` of the device functions.

        See `moe_core.kernels.gemm.fragments.operand`.
        """
        return PackedWeight.of(self.words, self.scales, self.channel_scales)

    @property
    def activation_columns(self) -> Columns:
        """Order of the activation columns."""
        return Columns(self.k, self.index, self.pre_scales)

    def gemm_weight(self, functions: Functions, words: WordFunctions | None = None) -> GemmWeight:
        """Return the weight of a GEMM.

        Args:
            functions: Functions of the element type.
            words: Functions of the warp-specialized kernel, if it can multiply such a matrix; or None.

        Returns:
            The weight.
        """
        special = None
        if words is not None:
            scales = (self.arguments._replace(powers=words.powers), words.groups)
            special = WarpSpecializedGemm(self.words, words.dequantize, scales, STEP, words_gemm, ROWS, gathers=True)
        return GemmWeight(
            self.arguments,
            self.n,
            self.k,
            lambda config: TileFunctions(open_plain, load_plain, *functions(self, config)),
            bias=self.bias,
            whole_steps=True,
            packed=32 // self.bits,
            interleaved=self.interleaved,
            warp_specialized=special,
        )


class WordFunctions(NamedTuple):
    """Functions of an element type for the warp-specialized kernel.

    ``dequantize`` returns a device function

        dequantize(words, scales, U, dtype) -> the eight values [64, 4] of `words` [64, 4], as `dequant.asm_values`

    for word U of four threads, which has the columns 32 U .. 32 U + 31 of a step
    (`moe_core.kernels.gemm.fragments.fragment_order`). `scales` is a tuple of [64]: one for each of the ``groups``, or
    the row's scale.

    Attributes:
        groups: Groups of a step with separate scales; 0 if rows have one scale each.
        dequantize: Returns the device function.
        powers: float32 [E], see `moe_core.kernels.gemm.fragments.scales.powers_of`; or None. Scales are then multiplied
            by 2^126 / power first, and finished sums by power * 2^7.
    """

    groups: int
    dequantize: Callable[[], Any]
    powers: Tensor | None = None


#: The tile kernel's open_b, load_b, multiply and scale_acc for a matrix and a tile.
Functions = Callable[[MarlinMatrix, TileConfig], tuple[Any, Any, Any, Any]]
