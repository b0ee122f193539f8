"""Conversion of canonical integer weights to fragment order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_core.errors import TensorError
from moe_core.kernels.gemm.fragments.fragment_order import empty_words, interleave, interleaved_rows, order_words
from moe_core.kernels.gemm.fragments.scales import by_group, order_scales, pair_scales, powers_of, relative_scales
from moe_core.kernels.gemm.tiles.columns import Grouped, group_columns
from moe_core.spec.quant_key import QuantKey

#: Converts four bytes of two's complement to codes offset by 128, and back.
_SIGNS = -0x7F7F7F80


@dataclass(frozen=True, eq=False)
class Converted:
    """Tensors of a `MarlinMatrix`.

    Attributes:
        words: int32 words in fragment order.
        scales: Scales by group.
        group_size: Columns per group, which may be smaller than the key's.
        channel_scales: float32 [E, rows], or None.
        index: int32 [E, columns] of reordered columns, or None.
        powers: float32 [E], see `powers_of`, or None.
    """

    words: Tensor
    scales: Tensor
    group_size: int
    channel_scales: Tensor | None = None
    index: Tensor | None = None
    powers: Tensor | None = None

    @staticmethod
    def of(
        words: Tensor, scales: Tensor, group_size: int, channel_scales: Tensor | None = None, *, interleaved: bool
    ) -> Converted:
        """Build from scales in the original row order.

        Args:
            words: int32 words in fragment order.
            scales: [E, rows, C].
            group_size: Columns per group.
            channel_scales: [E, rows] in the original row order, or None.
            interleaved: Whether rows of the words are interleaved gate and up rows.

        Returns:
            The tensors, with rows of the scales ordered as those of the words.
        """
        if channel_scales is not None and interleaved:
            channel_scales = interleave(channel_scales)
        return Converted(words, by_group(scales, interleaved).contiguous(), group_size, channel_scales)


def convert_integers(
    codes: Tensor,
    scale: Tensor,
    key: QuantKey,
    columns: int,
    *,
    zero_point: Tensor | None = None,
    g_idx: Tensor | None = None,
    interleaved: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Converted:
    """Convert one of the two matrices of canonical weights.

    See :class:`moe_core.spec.weights.MoEWeights` for the tensors.

    With float16 activations, scales are relative to the largest of a row, whose power of two becomes a channel scale.
    Scales of symmetric groups stay 16-bit where that keeps their values. With zero points, scales keep 14 bits of
    mantissa, which holds any 16-bit type. With ``g_idx``, this synchronizes with the device.

    Args:
        codes: uint8, or int8 for 8-bit values in two's complement.
        scale: [E, rows, groups].
        key: Quantization key of the weights.
        columns: K of the matrix.
        zero_point: Zero points in the shape of ``scale``, or None.
        g_idx: int32 [E, K], the group of each column, or None.
        interleaved: Whether rows are gate and up, to be interleaved.
        dtype: Dtype of the activations.

    Returns:
        The converted tensors.

    Raises:
        TensorError: The group size, or the dtype of the codes, is not supported.
    """
    size = key.group_size
    if size not in (-1, 32, 64, 128):
        raise TensorError(f"group_size {size} is not supported; expected 32, 64, 128 or -1 (the whole row)")
    bits = key.dtype.bits
    signed = codes.dtype is torch.int8
    if signed and bits != 8:
        raise TensorError(f"codes have dtype {codes.dtype}, expected torch.uint8 for {bits} bits")
    codes = codes.view(torch.uint8) if signed else codes
    grouped = None
    if g_idx is not None and size != -1:
        grouped = group_columns(g_idx, size, scale.shape[2])
        size, columns = grouped.group_size, grouped.index.shape[1]
        words = _permuted_words(codes, grouped, bits, interleaved=interleaved)
        scale = _by_group(scale, grouped)
        zero_point = None if zero_point is None else _by_group(zero_point, grouped)
    else:
        words = order_words(codes, columns, bits, interleaved=interleaved)
    if signed:
        words.bitwise_xor_(_SIGNS)
    wide, channel_scales = scale, None
    if dtype is torch.float16 and size != -1:
        wide, channel_scales = relative_scales(scale.float())
        if scale.dtype is torch.bfloat16:
            # bfloat16 has the exponent range of float32. A small float16 scale next to a large one would
            # lose bits.
            wide = wide.to(scale.dtype)
        channel_scales = interleave(channel_scales) if interleaved else channel_scales
    index = None if grouped is None else grouped.index
    # Padded groups are recognized by their number (`MarlinExperts.matrix`), which pairs do not preserve.
    if zero_point is None and size == key.group_size != -1 and wide.dtype.itemsize == 2:
        scales = pair_scales(wide, interleaved=interleaved)
    else:
        scales = order_scales(wide, zero_point, interleaved=interleaved)
    unshifted = dtype is torch.bfloat16 and bits == 4 and size != -1 and zero_point is None
    return Converted(words, scales, size, channel_scales, index, powers_of(scales) if unshifted else None)


def _by_group(values: Tensor, grouped: Grouped) -> Tensor:
    """``values`` [E, rows, groups] gathered for the reordered groups."""
    index = grouped.groups[:, None, :].expand(-1, values.shape[1], -1)
    return values.gather(2, index)


def _permuted_words(codes: Tensor, grouped: Grouped, bits: int, *, interleaved: bool) -> Tensor:
    experts, rows, columns = codes.shape[0], codes.shape[1], grouped.index.shape[1]
    rows = interleaved_rows(rows) if interleaved else rows
    words = empty_words(experts, rows, columns, bits, codes.device)
    for out, one, index in zip(words, codes, grouped.index, strict=True):
        if bits == 4:
            one = torch.stack((one & 15, one >> 4), dim=2).flatten(1)
        # Padding columns meet zeros of the activations.
        one = one.index_select(1, index.clamp_min(0))
        if bits == 4:
            one = torch.nn.functional.pad(one, (0, columns % 2))
            one = one[:, 0::2] | one[:, 1::2] << 4
        out.copy_(order_words(one[None], columns, bits, interleaved=interleaved)[0])
    return words
