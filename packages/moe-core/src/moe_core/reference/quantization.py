"""Quantising and dequantising by key, in plain torch: one rule for every element type, scale and group shape.

With ``amax`` over the elements that share a scale, all in float32:

    symmetric      scale = max(amax, AMAX_FLOOR) / max_value          code = round(x / scale)
    zero points    scale = (max - min) / (max_value - min_value)      code = round(x / scale) + zero_point
    e8m0 scales    scale rounded up to a power of two: no value saturates
      "down"       2**(floor(log2(amax)) - floor(log2(max_value))), the rule of OCP's specification
      "even"       the same of amax rounded to the precision of codes: it goes up from 1.75 times a power of two (e2m1),
                   or 1.9375 times (e4m3)

``round`` is to nearest, ties to even, saturating at the element type's largest finite value; the range of values
with zero points always includes 0.  A scale narrower than float32 is rounded before it is used.

NaN stays NaN.  Where its code can't say so (integers), its scale does, and where others' values have that scale too,
:func:`fake_quantize` and :func:`integer_row_scales` do.  An infinity saturates like any value that is too large for a
scale that is given; a scale found from it makes it and its group NaN.  One dynamic scale for a whole tensor of
activations spans its finite values, so that what is not finite makes no other token NaN.

Tensors are weights ``[E, rows, K]``, where ``parts`` stacked matrices (gate and up: 2) own their scale rows (see
:func:`moe_core.spec.weights.scale_shape`), or activations ``[M, K]``.  This is the reference that kernels are measured
against, and fast enough to quantise a layer at load.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moe_core._support.e4m3 import decode_e4m3
from moe_core.errors import ConfigError, TensorError, check_dtype, check_instance, check_shape
from moe_core.spec.numerics import AMAX_FLOOR, E2M1_VALUES, FP4_E2M1, FP8_E4M3, NumberKind, e8m0_to_float32, is_e8m0
from moe_core.spec.quant_key import Packing, QuantKey, check_one_level
from moe_core.spec.weights import MoEWeights, scale_shape, storage_dtypes, with_groups_of


class Quantized(NamedTuple):
    """Codes in canonical storage, their scale, and zero points where the key has them."""

    values: Tensor
    scale: Tensor
    zero_point: Tensor | None = None


def quantize_weight(
    w: Tensor,
    key: QuantKey,
    *,
    parts: int = 1,
    g_idx: Tensor | None = None,
    groups: int | None = None,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
) -> Quantized:
    """Quantise weights ``w`` [E, rows, K] (any float dtype) as ``key`` says; see the module docstring.

    ``g_idx`` [E, K]: the group of each column, for permuted keys, of any number of columns; ``groups`` there are, where
    that is not what the key's group size makes of K.  ``scale``, and for keys that have them ``zero_point``: used
    instead of computed ones.  Returns canonical tensors: values ``[E, rows, K]`` (packed: K divided by the values per
    word, rounded up), scale and zero point of :func:`moe_core.spec.weights.scale_shape`.
    """
    check_shape("w", w, ("E", "rows", "K"))
    check_instance("key", key, QuantKey)
    _check_parts(w.shape[1], parts)
    _check_g_idx(key, g_idx, w)
    if scale is not None:
        if key.symmetric is not (zero_point is None):
            state = "given" if zero_point is not None else "missing beside the given scale"
            raise ConfigError(f"zero_point is {state}, the key is {key}")
        expected = with_groups_of(scale, scale_shape(key, w.shape[0], w.shape[1], w.shape[2], parts), key)
        check_shape("scale", scale, expected)
        check_dtype("scale", scale, (key.scale.dtype,))
        if zero_point is not None:
            check_shape("zero_point", zero_point, expected)
    elif zero_point is not None:
        raise ConfigError("zero_point is given without its scale")
    if g_idx is not None:
        codes, scale, zero_point = _quantize_permuted(w.float(), key, parts, g_idx, groups, scale, zero_point)
    else:
        codes, scale, zero_point = _quantize(w.float(), key, parts, scale, zero_point)
    return Quantized(_pack(codes, key), scale, zero_point)


def dequantize_weight(
    q: Tensor,
    scale: Tensor,
    key: QuantKey,
    *,
    parts: int = 1,
    zero_point: Tensor | None = None,
    g_idx: Tensor | None = None,
    cols: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Values [E, rows, K] of canonical weights ``q`` [E, rows, K / values per word].

    ``cols``: K, where the last packed word is not full.  Computed in float64 for ``dtype`` float64, where every value
    is exact; otherwise in float32, rounded once per element, and once more to a narrower ``dtype``.

    Raises TensorError where the tensors don't fit each other or the key.
    """
    check_shape("q", q, ("E", "rows", "K"))
    check_instance("key", key, QuantKey)
    check_dtype("q", q, storage_dtypes(key))
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    codes = _unpack(q, key, cols)
    experts, rows, width = codes.shape
    _check_parts(rows, parts)
    _check_g_idx(key, g_idx, codes)
    expected = with_groups_of(scale, scale_shape(key, experts, rows, width, parts), key)
    check_shape("scale", scale, expected)
    if (zero_point is None) != key.symmetric:
        raise TensorError(f"zero_point is {'missing' if zero_point is None else 'given'}, the key is {key}")
    values = _decode(codes, key, wide)
    if not values.numel():
        return values.to(dtype)
    factor = scale_values(scale, key).to(wide)
    grid = Grid.of(key, experts, rows, width, parts)
    if zero_point is not None:
        check_shape("zero_point", zero_point, expected)
        values = values.sub_(grid.spread(zero_point.to(wide), g_idx))
    if g_idx is not None:
        return values.mul_(grid.spread(factor, g_idx)).to(dtype)
    return grid.multiply_(values, factor).to(dtype)


def quantize_tensor(
    x: Tensor, key: QuantKey, *, scale: Tensor | None = None, zero_point: Tensor | None = None
) -> Quantized:
    """Quantise activations ``x`` [M, K] as ``key`` says: values [M, K], scale of the key's grid ([1] per tensor).

    ``scale`` (and ``zero_point``, where the key has them) are used instead of computed ones; a static key needs them.
    """
    check_shape("x", x, ("M", "K"))
    if scale is None and key.is_static:
        raise TensorError(f"the scale is missing, the activation key is {key}")
    if scale is not None:
        scale = _as_grid(scale, key, x)
        zero_point = None if zero_point is None else _as_grid(zero_point, key, x)
    x = x.float()
    if scale is None and key.group_shape.is_per_tensor and x.numel():
        finite = x.isfinite()
        given = torch.where(finite, x, 0.0)
        low, high = given.aminmax()
        scale, zero_point = scale_of_range(low.view(1, 1), high.view(1, 1), key)
        x = torch.where(finite, x, torch.nan)
    codes, scale, zero_point = _quantize(x[None], key, 1, scale, zero_point)
    return Quantized(_pack(codes, key)[0], scale[0], None if zero_point is None else zero_point[0])


def fake_quantize(x: Tensor, key: QuantKey, *, scale: Tensor | None = None, zero_point: Tensor | None = None) -> Tensor:
    """Activations ``x`` [M, K] quantised and dequantised; float64 values are exact, in ``x``'s dtype otherwise."""
    if x.numel() == 0:
        return x.clone()
    quantized = quantize_tensor(x, key, scale=scale, zero_point=zero_point)
    values = dequantize_tensor(quantized, key, cols=x.shape[1], dtype=x.dtype)
    return values if key.dtype.kind is NumberKind.FLOAT else values.masked_fill_(_lost(x, key), torch.nan)


def integer_row_scales(scale: Tensor, x: Tensor, key: QuantKey) -> Tensor:
    """[R, 1]: the scales of the rows of ``x`` [R, K] of integer activations, NaN where codes lose a NaN of the row.

    ``scale`` as :func:`quantize_tensor` returns it for ``x``, one per row or for all.
    """
    check_one_level(key)
    rows = scale.reshape(-1, 1).expand(len(x), 1)
    return rows.masked_fill(_lost(x, key).any(dim=1, keepdim=True), torch.nan)


def _lost(x: Tensor, key: QuantKey) -> Tensor:
    """Which values of ``x`` are NaN once they are quantised: where a scale is found from them, infinities too."""
    return x.isnan() if key.is_static else ~x.isfinite()


def dequantize_tensor(
    quantized: Quantized, key: QuantKey, *, cols: int | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Values [M, K] of quantised activations."""
    zero_point = None if quantized.zero_point is None else quantized.zero_point[None]
    return dequantize_weight(
        quantized.values[None], quantized.scale[None], key, zero_point=zero_point, cols=cols, dtype=dtype
    )[0]


def quantize_moe_weights(
    w13: Tensor,
    w2: Tensor,
    *,
    gated: bool,
    weight_key: QuantKey | None,
    activation_key: QuantKey | None = None,
    w13_input_scale: Tensor | None = None,
    w2_input_scale: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    w13_g_idx: Tensor | None = None,
    w2_g_idx: Tensor | None = None,
    w13_groups: int | None = None,
    w2_groups: int | None = None,
    w13_pre_scale: Tensor | None = None,
    w2_pre_scale: Tensor | None = None,
) -> MoEWeights:
    """Canonical weights from float ``w13`` [E, 2N, K] ([E, N, K] where not ``gated``) and ``w2`` [E, K, N].

    ``weight_key`` None keeps the weights as they are.  Biases, static input scales, ``g_idx`` and factors of inputs are
    carried through; ``w13_groups``, ``w2_groups``: see :func:`quantize_weight`.
    """
    check_instance("gated", gated, bool)
    check_instance("weight_key", weight_key, QuantKey, type(None))
    w13_scale = w2_scale = w13_zero_point = w2_zero_point = None
    if weight_key is not None:
        w13, w13_scale, w13_zero_point = quantize_weight(
            w13, weight_key, parts=2 if gated else 1, g_idx=w13_g_idx, groups=w13_groups
        )
        w2, w2_scale, w2_zero_point = quantize_weight(w2, weight_key, g_idx=w2_g_idx, groups=w2_groups)
    return MoEWeights(
        weight_key=weight_key,
        activation_key=activation_key,
        w13=w13,
        w2=w2,
        w13_scale=w13_scale,
        w2_scale=w2_scale,
        w13_zero_point=w13_zero_point,
        w2_zero_point=w2_zero_point,
        w13_input_scale=w13_input_scale,
        w2_input_scale=w2_input_scale,
        w13_bias=w13_bias,
        w2_bias=w2_bias,
        w13_g_idx=w13_g_idx,
        w2_g_idx=w2_g_idx,
        w13_pre_scale=w13_pre_scale,
        w2_pre_scale=w2_pre_scale,
    )


# ------------------------------------------------------------------ groups


@dataclass(frozen=True)
class Grid:
    """Which elements of ``[E, rows, K]`` share a scale: ``parts`` grids of row x col groups, the edge ones partial."""

    experts: int
    parts: int
    part_rows: int
    cols: int
    row: int  # rows and columns of one group
    col: int

    @staticmethod
    def of(key: QuantKey, experts: int, rows: int, cols: int, parts: int) -> Grid:
        shape = key.group_shape
        part_rows = rows // parts
        row = part_rows if shape.row == -1 else shape.row
        col = cols if shape.col == -1 else shape.col
        return Grid(experts, parts, part_rows, cols, max(row, 1), max(col, 1))

    @property
    def grid_rows(self) -> int:
        return -(-self.part_rows // self.row)

    @property
    def grid_cols(self) -> int:
        return -(-self.cols // self.col)

    def groups(self, x: Tensor) -> Tensor:
        """``x`` as [E, parts, grid_rows, row, grid_cols, col], partial groups filled up with zeros."""
        x = x.reshape(self.experts, self.parts, self.part_rows, self.cols)
        below = self.grid_rows * self.row - self.part_rows
        right = self.grid_cols * self.col - self.cols
        if below or right:
            x = torch.nn.functional.pad(x, (0, right, 0, below))
        return x.reshape(self.experts, self.parts, self.grid_rows, self.row, self.grid_cols, self.col)

    def ungroup(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`groups`, without the filling."""
        x = x.reshape(self.experts, self.parts, self.grid_rows * self.row, self.grid_cols * self.col)
        x = x[:, :, : self.part_rows, : self.cols]
        return x.reshape(self.experts, self.parts * self.part_rows, self.cols)

    def per_group(self, scale: Tensor) -> Tensor:
        """A scale of the canonical shape as [E, parts, grid_rows, 1, grid_cols, 1]."""
        return scale.reshape(self.experts, self.parts, self.grid_rows, 1, self.grid_cols, 1)

    def spread(self, scale: Tensor, g_idx: Tensor | None = None) -> Tensor:
        """A scale of the canonical shape as a tensor that broadcasts against [E, rows, K]."""
        scale = scale.reshape(self.experts, self.parts, self.grid_rows, -1)
        if g_idx is not None:
            index = g_idx.long()[:, None, None, :].expand(*scale.shape[:3], self.cols)
            scale = scale.gather(3, index)
        elif self.grid_cols > 1:
            scale = scale.repeat_interleave(self.col, dim=3)[..., : self.cols]
        if self.grid_rows == self.part_rows:
            return scale.reshape(self.experts, self.parts * self.part_rows, -1)
        scale = scale.repeat_interleave(self.row, dim=2)[:, :, : self.part_rows]
        return scale.reshape(self.experts, self.parts * self.part_rows, -1)

    def multiply_(self, values: Tensor, scale: Tensor) -> Tensor:
        """``values`` [E, rows, K] times a scale of the canonical shape, in place; the scale is never spread out."""
        grid = scale.reshape(self.experts, self.parts, self.grid_rows, 1, self.grid_cols, 1)
        x = values.view(self.experts, self.parts, self.part_rows, self.cols)
        for first, last, row in _extents(self.part_rows, self.row):
            for left, right, col in _extents(self.cols, self.col):
                whole = x[:, :, first:last, left:right]
                part = whole.view(*x.shape[:2], (last - first) // row, row, (right - left) // col, col)
                rows = slice(first // self.row, -(-last // self.row))
                part.mul_(grid[:, :, rows, :, left // self.col : -(-right // self.col)])
        return values


def _extents(size: int, group: int) -> list[tuple[int, int, int]]:
    """(begin, end, group size) of what full groups cover of ``size`` elements, and of the partial group behind."""
    full = size // group * group
    return [(begin, end, step) for begin, end, step in ((0, full, group), (full, size, size - full)) if begin < end]


def _check_parts(rows: int, parts: int) -> None:
    check_instance("parts", parts, int)
    if parts < 1 or rows % parts:
        raise TensorError(f"{rows} rows are no {parts} stacked matrices of equal height")


def _check_g_idx(key: QuantKey, g_idx: Tensor | None, like: Tensor) -> None:
    if (g_idx is not None) != key.permuted:
        raise TensorError(f"g_idx is {'missing' if g_idx is None else 'given'}, the key is {key}")
    if g_idx is not None:
        check_shape("g_idx", g_idx, (like.shape[0], like.shape[2]))


def _as_grid(scale: Tensor, key: QuantKey, x: Tensor) -> Tensor:
    """An activation's scale, possibly a scalar, in the canonical shape of [1, M, K]."""
    shape = scale_shape(key, 1, x.shape[0], x.shape[1])
    if scale.numel() == 1:
        return scale.reshape([1] * len(shape)).expand(shape)
    check_shape("scale", scale, shape[1:])
    return scale[None]


# ------------------------------------------------------------------ scales


def _quantize(
    x: Tensor, key: QuantKey, parts: int, scale: Tensor | None = None, zero_point: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Unpacked codes of float32 ``x`` [E, rows, K], canonical scale and zero point."""
    experts, rows, cols = x.shape
    shape = scale_shape(key, experts, rows, cols, parts)
    if x.numel() == 0:
        empty = torch.zeros(shape, dtype=torch.float32, device=x.device)
        return _encode(x, key), _store_scale(empty, key), None if key.symmetric else empty.to(torch.int32)
    grid = Grid.of(key, experts, rows, cols, parts)
    groups = grid.groups(x)
    if scale is None:
        low, high = groups.amin(dim=(3, 5)), groups.amax(dim=(3, 5))
        scale, zero_point = scale_of_range(low, high, key)
    factor = grid.per_group(scale_values(scale, key))
    scaled = groups / factor
    if zero_point is not None:
        # rounding comes before the zero point is added, as integer hardware does it
        scaled = scaled.round_().add_(grid.per_group(zero_point.float() - key.dtype.offset))
        zero_point = zero_point.reshape(shape)
    return _encode(grid.ungroup(scaled), key), scale.reshape(shape), zero_point


def _quantize_permuted(
    w: Tensor,
    key: QuantKey,
    parts: int,
    g_idx: Tensor,
    groups: int | None,
    scale: Tensor | None,
    zero_point: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """:func:`_quantize` where ``g_idx`` [E, K] says the group of each column."""
    grid = Grid.of(key, w.shape[0], w.shape[1], w.shape[2], parts)
    shape = (w.shape[0], parts * grid.grid_rows, groups or grid.grid_cols)
    if scale is None:
        rows = w.reshape(grid.experts, parts, grid.part_rows, grid.cols)
        rows = torch.nn.functional.pad(rows, (0, 0, 0, grid.grid_rows * grid.row - grid.part_rows))
        rows = rows.view(grid.experts, parts * grid.grid_rows, grid.row, grid.cols)
        index = g_idx.long()[:, None, :].expand(-1, shape[1], -1)
        nothing = w.new_zeros(shape)
        # a range always includes 0, so groups may begin with it
        low = nothing.scatter_reduce(2, index, rows.amin(dim=2), "amin")
        high = nothing.scatter_reduce(2, index, rows.amax(dim=2), "amax")
        scale, zero_point = scale_of_range(low, high, key)
    scaled = w / grid.spread(scale_values(scale, key), g_idx)
    if zero_point is not None:
        scaled = scaled.round_().add_(grid.spread(zero_point.float() - key.dtype.offset, g_idx))
    return _encode(scaled, key), scale, zero_point


def scale_of_range(low: Tensor, high: Tensor, key: QuantKey) -> tuple[Tensor, Tensor | None]:
    """Stored scale and zero point of groups whose smallest and largest elements are ``low`` and ``high``."""
    dtype = key.dtype
    if key.symmetric:
        amax = torch.maximum(low.abs(), high.abs()).float().clamp_min(AMAX_FLOOR)
        if key.scale.rounding != "up":
            return _exponents(amax, key), None
        # by a tensor: torch turns division by a number into a product with its inverse on a GPU
        return _store_scale(amax / torch.full_like(amax, dtype.max_value), key), None
    low, high = low.float().clamp_max(0.0), high.float().clamp_min(0.0)
    width = (high - low).clamp_min(AMAX_FLOOR)
    width = torch.where(width.isinf(), torch.nan, width)  # beside a zero point, infinity would leave infinities
    scale = _store_scale(width / torch.full_like(width, dtype.max_value - dtype.min_value), key)
    zero_point = (dtype.min_value - low / scale_values(scale, key)).round()
    # stored like a code, so offset-binary types shift it as well
    zero_point = zero_point.clamp(dtype.min_value, dtype.max_value).nan_to_num(0.0)
    return scale, (zero_point + dtype.offset).to(torch.int32)


#: bits of an element's mantissa, and the exponent of its largest value: 6 is 1.5 * 2**2, 448 is 1.75 * 2**8
_MANTISSA_AND_EXPONENT = {FP4_E2M1: (1, 2), FP8_E4M3: (3, 8)}


def _exponents(amax: Tensor, key: QuantKey) -> Tensor:
    """e8m0 codes of float32 ``amax`` for a key that rounds "down" or "even"."""
    if key.dtype not in _MANTISSA_AND_EXPONENT or not is_e8m0(key.scale.dtype):
        raise ConfigError(f"scales are rounded 'up' but for e2m1 and e4m3 codes with e8m0 scales, the key is {key}")
    mantissa, exponent = _MANTISSA_AND_EXPONENT[key.dtype]
    bits = amax.view(torch.int32)
    if key.scale.rounding == "even":
        # half of the last place of a code's mantissa
        bits = bits + (1 << 22 - mantissa)
    codes = torch.where(amax.isfinite(), ((bits >> 23) - exponent).clamp(0, 254), 255)
    return codes.to(torch.uint8).view(key.scale.dtype)


def _store_scale(scale: Tensor, key: QuantKey) -> Tensor:
    """A float32 scale in the key's dtype."""
    dtype = key.scale.dtype
    if is_e8m0(dtype):
        # up to the next power of two: the exponent field, plus one if anything is below it
        bits = scale.float().view(torch.int32)
        codes = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
        codes = torch.where(scale.isfinite(), codes.clamp(0, 254), 255)  # NaN where the scale is no number
        return codes.to(torch.uint8).view(dtype)
    if dtype is torch.float32:
        return scale
    # a scale that rounds to zero would divide by zero
    info = torch.finfo(dtype)
    return scale.to(dtype).clamp_min(info.smallest_normal * info.eps)


def scale_values(scale: Tensor, key: QuantKey) -> Tensor:
    """A stored scale in float32."""
    return e8m0_to_float32(scale) if is_e8m0(key.scale.dtype) else scale.float()


# ------------------------------------------------------------------ elements

# boundaries between the magnitudes of e2m1; a tie goes to the even code: every second boundary belongs to the upper one
_E2M1_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def _encode(scaled: Tensor, key: QuantKey) -> Tensor:
    """Unpacked codes of values that are already divided by their scale (zero point added)."""
    dtype = key.dtype
    if dtype.kind is NumberKind.FLOAT:
        if dtype.bits == 8:
            return scaled.clamp(dtype.min_value, dtype.max_value).to(storage_dtypes(key)[0])
        upper = torch.tensor(_E2M1_TIES, dtype=torch.float32, device="cpu")
        upper[1::2] = torch.nextafter(upper[1::2], upper.new_zeros(()))
        magnitude = torch.bucketize(scaled.abs().contiguous(), upper.to(scaled.device))
        return (magnitude + 8 * torch.signbit(scaled)).to(torch.uint8)
    # an integer can't be NaN: 0, and the scale says it
    codes = scaled.round().clamp(dtype.min_value, dtype.max_value).nan_to_num(0.0) + dtype.offset
    if dtype.kind is NumberKind.INT and key.packing is not None:
        return codes.to(torch.int16).bitwise_and(2**dtype.bits - 1).to(torch.uint8)
    return codes.to(torch.int8 if dtype.kind is NumberKind.INT else torch.uint8)


def _decode(codes: Tensor, key: QuantKey, wide: torch.dtype) -> Tensor:
    """Values of unpacked codes as a new tensor, zero point not yet subtracted."""
    dtype = key.dtype
    if dtype.kind is NumberKind.FLOAT:
        if dtype.name == "e4m3":
            return decode_e4m3(codes).to(wide)
        if dtype.bits == 8:
            return codes.to(wide)
        return (
            torch.tensor(E2M1_VALUES, dtype=wide, device=codes.device)
            .index_select(0, codes.flatten().int())
            .view(codes.shape)
        )
    if dtype.kind is NumberKind.INT and key.packing is not None:
        half = 2 ** (dtype.bits - 1)
        return torch.bitwise_xor(codes.to(torch.int16), half).sub_(half).to(wide)
    values = codes.to(wide)
    if key.symmetric and dtype.offset:
        values.sub_(dtype.offset)
    return values


def _pack(codes: Tensor, key: QuantKey) -> Tensor:
    """Unpacked codes [E, rows, K] in the key's storage."""
    packing = key.packing
    if packing is None:
        return codes
    along = _axis(packing)
    count = packing.values_per_word
    size = codes.shape[along]
    if packing.axis == "n" and size % count:
        raise TensorError(f"{size} rows don't fill words of {count} values")
    missing = -size % count
    if missing:
        codes = torch.nn.functional.pad(codes, (0, missing))
    codes = codes.reshape(*codes.shape[:along], codes.shape[along] // count, count, *codes.shape[along + 1 :])
    # torch has no unsigned 32-bit shifts: words are put together in int64 and their low bits kept
    shifts = key.dtype.bits * torch.arange(count, device=codes.device)
    shifts = shifts if along == 2 else shifts[:, None]
    if packing.storage is torch.uint8 and count == 2:
        low, high = codes.unbind(along + 1)
        return low | (high << key.dtype.bits)
    words = (codes.long() << shifts).sum(dim=along + 1)
    return words.to(packing.storage)


def _unpack(q: Tensor, key: QuantKey, cols: int | None) -> Tensor:
    """Unpacked codes [E, rows, K] of storage ``q``."""
    packing = key.packing
    if packing is None:
        if cols is not None and cols != q.shape[2]:
            raise TensorError(f"q has {q.shape[2]} columns, expected {cols}")
        return q
    along = _axis(packing)
    bits = key.dtype.bits
    shifts = bits * torch.arange(packing.values_per_word, device=q.device)
    if along == 1:
        shifts = shifts[:, None]
    words = q if packing.storage is torch.uint8 else q.long()
    fields: Tensor = (words.unsqueeze(along + 1) >> shifts.to(words.dtype)) & (2**bits - 1)
    codes = fields.to(torch.uint8).flatten(along, along + 1)
    if cols is None or cols == codes.shape[2]:
        return codes
    if packing.axis == "n" or not 0 <= codes.shape[2] - cols < packing.values_per_word:
        raise TensorError(f"q holds {codes.shape[2]} columns, expected {cols}")
    return codes[:, :, :cols]


def _axis(packing: Packing) -> int:
    return 2 if packing.axis == "k" else 1
