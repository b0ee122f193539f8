"""Quantization and dequantization by key in plain torch, for all element types and groups.

With ``amax`` over the elements that share a scale, all in float32:

    symmetric      scale = max(amax, AMAX_FLOOR) / max_value          code = round(x / scale)
    zero points    scale = (max - min) / (max_value - min_value)      code = round(x / scale) + zero_point
    e8m0 scales    scale rounded up to a power of two: no value saturates
      "down"       2**(floor(log2(amax)) - floor(log2(max_value))), the rule of OCP's specification
      "even"       the same with amax rounded to the precision of codes: it goes up from 1.75 times a power of two
                   (e2m1), or 1.9375 times (e4m3)

With a second level of scales, that scale is ``amax / (max_value * largest scale)`` of the elements that share it, and
the first level is computed from the elements divided by it, and stored in its own dtype. A value is divided by the
product of both.

``round`` is to nearest, ties to even, and saturates at the element type's largest finite value. The range of values
with zero points always includes 0. A scale narrower than float32 is rounded before it is used.

NaN stays NaN. If the code cannot represent it (integers), the scale becomes NaN. If other values share that scale,
:func:`fake_quantize` and :func:`integer_row_scales` handle it instead. An infinity saturates if the scale is given,
like any value that is too large. If the scale is computed from it, the whole group becomes NaN. A dynamic per-tensor
scale of activations covers the finite values only, so that one token's NaN or Inf does not affect other tokens.

Tensors are weights ``[E, rows, K]`` or activations ``[M, K]``. In weights, ``parts`` stacked matrices (2 for gate and
up) have separate scale rows (see :func:`moe_core.spec.roles.scale_shape`). This module is the reference that
kernels are measured against, and fast enough to quantize a layer at load time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_core._support.e4m3 import decode_e4m3
from moe_core.errors import ConfigError, TensorError, check_dtype, check_instance, check_shape
from moe_core.spec.numerics import AMAX_FLOOR, NumberKind, e8m0_to_float32, is_e8m0
from moe_core.spec.quant_key import Packing, QuantKey, ScaleDesc
from moe_core.spec.roles import scale_shape, storage_dtypes
from moe_core.spec.weights import MoEWeights, with_groups_of


class Quantized(NamedTuple):
    """Quantized tensor.

    Attributes:
        values: Codes in canonical storage.
        scale: Their scale.
        zero_point: Zero points, if the key has them.
        scale2: Second level of scales, if the key has one.
    """

    values: Tensor
    scale: Tensor
    zero_point: Tensor | None = None
    scale2: Tensor | None = None


def quantize_weight(
    w: Tensor,
    key: QuantKey,
    *,
    parts: int = 1,
    g_idx: Tensor | None = None,
    groups: int | None = None,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    scale2: Tensor | None = None,
) -> Quantized:
    """Quantize weights as ``key`` specifies; see the module docstring.

    Args:
        w: [E, rows, K], any float dtype.
        key: Quantization key.
        parts: Number of stacked matrices (gate and up: 2).
        g_idx: [E, K], the group of each column, for permuted keys. A group may have any number of columns.
        groups: Number of groups, if it is not the one that follows from K and the key's group size.
        scale: Scale to use instead of a computed one.
        zero_point: Zero points to use with ``scale``, for keys that have them.
        scale2: Second scale to use instead of a computed one; required with ``scale``, for keys that have it.

    Returns:
        Canonical tensors: values ``[E, rows, K]`` (packed: K divided by the values per word, rounded up), scales and
            zero point in the shape of :func:`moe_core.spec.roles.scale_shape`.

    Raises:
        TensorError: Tensors do not fit together or the key.
        ConfigError: ``scale``, ``scale2`` and ``zero_point`` do not fit the key.
    """
    check_shape("w", w, ("E", "rows", "K"))
    check_instance("key", key, QuantKey)
    _check_parts(w.shape[1], parts)
    _check_g_idx(key, g_idx, w)
    if scale is not None:
        for name, tensor, needed in (
            ("zero_point", zero_point, not key.symmetric),
            ("scale2", scale2, key.scale2 is not None),
        ):
            if needed is not (tensor is not None):
                state = "given" if tensor is not None else "missing beside the given scale"
                raise ConfigError(f"{name} is {state}, the key is {key}")
        expected = with_groups_of(scale, scale_shape(key, w.shape[0], w.shape[1], w.shape[2], parts), key)
        check_shape("scale", scale, expected)
        check_dtype("scale", scale, (key.scale.dtype,))
        if zero_point is not None:
            check_shape("zero_point", zero_point, expected)
    elif zero_point is not None:
        raise ConfigError("zero_point is given without its scale")
    w, scale2 = _divided(w.float(), w, key, parts, scale2)
    if g_idx is not None:
        codes, scale, zero_point = _quantize_permuted(w, key, parts, g_idx, groups, scale, zero_point)
    else:
        codes, scale, zero_point = _quantize(w, key, parts, scale, zero_point)
    return Quantized(_pack(codes, key), scale, zero_point, scale2)


def dequantize_weight(
    q: Tensor,
    scale: Tensor,
    key: QuantKey,
    *,
    parts: int = 1,
    zero_point: Tensor | None = None,
    g_idx: Tensor | None = None,
    scale2: Tensor | None = None,
    cols: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Dequantize canonical weights.

    For float64 the computation is in float64, where every value is exact. Otherwise it is in float32, rounded once
    per element and scale, and once more to a narrower ``dtype``.

    Args:
        q: [E, rows, K / values per word].
        scale: Scale in the canonical shape.
        key: Quantization key.
        parts: Number of stacked matrices (gate and up: 2).
        zero_point: Zero points, for keys that have them.
        g_idx: [E, K], the group of each column, for permuted keys.
        scale2: Second scale in the canonical shape, for keys that have one.
        cols: K, if the last packed word is not full.
        dtype: Dtype of the result.

    Returns:
        [E, rows, K].

    Raises:
        TensorError: Tensors do not fit together or the key.
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
    if (scale2 is None) != (key.scale2 is None):
        raise TensorError(f"scale2 is {'missing' if scale2 is None else 'given'}, the key is {key}")
    values = _decode(codes, key, wide)
    if not values.numel():
        return values.to(dtype)
    factor = scale_values(scale).to(wide)
    grid = Grid.of(key.scale, experts, rows, width, parts)
    if zero_point is not None:
        check_shape("zero_point", zero_point, expected)
        values = values.sub_(grid.spread(zero_point.to(wide), g_idx))
    if g_idx is not None:
        values.mul_(grid.spread(factor, g_idx))
    else:
        grid.multiply_(values, factor)
    if scale2 is not None and key.scale2 is not None:
        check_shape("scale2", scale2, scale_shape(key.scale2, experts, rows, width, parts))
        Grid.of(key.scale2, experts, rows, width, parts).multiply_(values, scale_values(scale2).to(wide))
    return values.to(dtype)


def quantize_tensor(
    x: Tensor,
    key: QuantKey,
    *,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    scale2: Tensor | None = None,
) -> Quantized:
    """Quantize activations as ``key`` specifies.

    Args:
        x: [M, K].
        key: Quantization key.
        scale: Scale to use instead of a computed one; required for a static scale.
        zero_point: Zero points to use with ``scale``, for keys that have them.
        scale2: Second scale to use instead of a computed one; required for a static second scale.

    Returns:
        Values [M, K] and scales in the key's grid ([1] per tensor).

    Raises:
        TensorError: A static scale is missing.
    """
    check_shape("x", x, ("M", "K"))
    for name, level, tensor in (("scale", key.scale, scale), ("scale2", key.scale2, scale2)):
        if tensor is None and level is not None and level.static:
            raise TensorError(f"{name} is missing, the activation key is {key}")
    scale, zero_point = _as_grid(scale, key.scale, x), _as_grid(zero_point, key.scale, x)
    x = x.float()
    if key.scale2 is not None:
        finite = torch.where(x.isfinite(), x, 0.0)
        divided, scale2 = _divided(x[None], finite[None], key, 1, _as_grid(scale2, key.scale2, x))
        x = divided[0]
    if scale is None and key.group_shape.is_per_tensor and x.numel():
        finite = x.isfinite()
        given = torch.where(finite, x, 0.0)
        low, high = given.aminmax()
        scale, zero_point = scale_of_range(low.view(1, 1), high.view(1, 1), key)
        x = torch.where(finite, x, torch.nan)
    codes, scale, zero_point = _quantize(x[None], key, 1, scale, zero_point)
    return Quantized(
        _pack(codes, key)[0],
        scale[0],
        None if zero_point is None else zero_point[0],
        None if scale2 is None else scale2[0],
    )


def fake_quantize(
    x: Tensor,
    key: QuantKey,
    *,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    scale2: Tensor | None = None,
) -> Tensor:
    """Quantize and dequantize activations.

    Args:
        x: [M, K].
        key: Quantization key.
        scale: Scale to use instead of a computed one; required for a static scale.
        zero_point: Zero points to use with ``scale``, for keys that have them.
        scale2: Second scale to use instead of a computed one; required for a static second scale.

    Returns:
        [M, K] in the dtype of ``x``; float64 values are exact.
    """
    if x.numel() == 0:
        return x.clone()
    quantized = quantize_tensor(x, key, scale=scale, zero_point=zero_point, scale2=scale2)
    values = dequantize_tensor(quantized, key, cols=x.shape[1], dtype=x.dtype)
    return values if key.dtype.kind is NumberKind.FLOAT else values.masked_fill_(_lost(x, key), torch.nan)


def integer_row_scales(scale: Tensor, x: Tensor, key: QuantKey) -> Tensor:
    """Compute row scales of integer activations, NaN where the codes lose a NaN of the row.

    Args:
        scale: Scale of ``x`` from :func:`quantize_tensor`, one per row or one for all.
        x: [R, K].
        key: Quantization key.

    Returns:
        [R, 1].
    """
    rows = scale.reshape(-1, 1).expand(len(x), 1)
    return rows.masked_fill(_lost(x, key).any(dim=1, keepdim=True), torch.nan)


def _lost(x: Tensor, key: QuantKey) -> Tensor:
    """Mask of values that are NaN after quantization.

    They include Inf if the scale is computed from the values.
    """
    return x.isnan() if key.scale.static else ~x.isfinite()


def dequantize_tensor(
    quantized: Quantized, key: QuantKey, *, cols: int | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Dequantize activations.

    Args:
        quantized: The quantized activations.
        key: Quantization key.
        cols: K, if the last packed word is not full.
        dtype: Dtype of the result.

    Returns:
        [M, K].
    """
    values, scale, zero_point, scale2 = (None if tensor is None else tensor[None] for tensor in quantized)
    if values is None or scale is None:
        raise TensorError("quantized has no values or no scale")
    return dequantize_weight(values, scale, key, zero_point=zero_point, scale2=scale2, cols=cols, dtype=dtype)[0]


def quantize_moe_weights(
    w13: Tensor,
    w2: Tensor,
    *,
    gated: bool,
    weight_key: QuantKey | None,
    activation_key: QuantKey | None = None,
    w13_g_idx: Tensor | None = None,
    w2_g_idx: Tensor | None = None,
    w13_groups: int | None = None,
    w2_groups: int | None = None,
    **kept: Tensor | None,
) -> MoEWeights:
    """Quantize the float weights of a layer to canonical weights.

    Args:
        w13: [E, 2N, K]; [E, N, K] if not ``gated``.
        w2: [E, K, N].
        gated: Whether w13 has gate and up rows.
        weight_key: Quantization key; None keeps the weights as they are.
        activation_key: Quantization key of the activations, recorded in the result.
        w13_g_idx: [E, K], the group of each column, for permuted keys.
        w2_g_idx: [E, N], the group of each column, for permuted keys.
        w13_groups: Number of groups, see :func:`quantize_weight`.
        w2_groups: Number of groups, see :func:`quantize_weight`.
        kept: Other tensors of :class:`moe_core.MoEWeights`, passed through to the result: static activation scales,
            biases, factors of inputs.

    Returns:
        The canonical weights.
    """
    check_instance("gated", gated, bool)
    check_instance("weight_key", weight_key, QuantKey, type(None))
    tensors: dict[str, Any] = {"w13": w13, "w2": w2, "w13_g_idx": w13_g_idx, "w2_g_idx": w2_g_idx, **kept}
    if weight_key is not None:
        for name, parts, groups in (("w13", 2 if gated else 1, w13_groups), ("w2", 1, w2_groups)):
            g_idx = tensors[f"{name}_g_idx"]
            found = quantize_weight(tensors[name], weight_key, parts=parts, g_idx=g_idx, groups=groups)
            tensors[name] = found.values
            tensors |= {f"{name}_{role}": tensor for role, tensor in found._asdict().items() if role != "values"}
    return MoEWeights(weight_key=weight_key, activation_key=activation_key, **tensors)


# ------------------------------------------------------------------ groups


@dataclass(frozen=True)
class Grid:
    """Assignment of the elements of ``[E, rows, K]`` to scales.

    There are ``parts`` grids of row x col groups; the groups at the edges may be partial.
    """

    experts: int
    parts: int
    part_rows: int
    cols: int
    row: int  # extent of one group: row x col
    col: int

    @staticmethod
    def of(scale: ScaleDesc, experts: int, rows: int, cols: int, parts: int) -> Grid:
        """Make the grid of a scale for weights [experts, rows, cols].

        Args:
            scale: Description of the scale.
            experts: Number of experts.
            rows: Number of rows of all parts together.
            cols: Number of columns.
            parts: Number of stacked matrices.

        Returns:
            The grid.
        """
        shape = scale.group_shape
        part_rows = rows // parts
        row = part_rows if shape.row == -1 else shape.row
        col = cols if shape.col == -1 else shape.col
        return Grid(experts, parts, part_rows, cols, max(row, 1), max(col, 1))

    @property
    def grid_rows(self) -> int:
        """Number of groups along the rows of one part."""
        return -(-self.part_rows // self.row)

    @property
    def grid_cols(self) -> int:
        """Number of groups along the columns."""
        return -(-self.cols // self.col)

    def groups(self, x: Tensor) -> Tensor:
        """View elements by group, with partial groups padded with zeros.

        Args:
            x: [E, rows, K].

        Returns:
            [E, parts, grid_rows, row, grid_cols, col].
        """
        x = x.reshape(self.experts, self.parts, self.part_rows, self.cols)
        below = self.grid_rows * self.row - self.part_rows
        right = self.grid_cols * self.col - self.cols
        if below or right:
            x = torch.nn.functional.pad(x, (0, right, 0, below))
        return x.reshape(self.experts, self.parts, self.grid_rows, self.row, self.grid_cols, self.col)

    def ungroup(self, x: Tensor) -> Tensor:
        """Invert :meth:`groups` and remove the padding.

        Args:
            x: [E, parts, grid_rows, row, grid_cols, col].

        Returns:
            [E, rows, K].
        """
        x = x.reshape(self.experts, self.parts, self.grid_rows * self.row, self.grid_cols * self.col)
        x = x[:, :, : self.part_rows, : self.cols]
        return x.reshape(self.experts, self.parts * self.part_rows, self.cols)

    def per_group(self, scale: Tensor) -> Tensor:
        """View a scale so that it broadcasts against :meth:`groups`.

        Args:
            scale: Scale in the canonical shape.

        Returns:
            [E, parts, grid_rows, 1, grid_cols, 1].
        """
        return scale.reshape(self.experts, self.parts, self.grid_rows, 1, self.grid_cols, 1)

    def spread(self, scale: Tensor, g_idx: Tensor | None = None) -> Tensor:
        """Expand a scale so that it broadcasts against [E, rows, K].

        Args:
            scale: Scale in the canonical shape.
            g_idx: [E, K], the group of each column, or None.

        Returns:
            [E, rows, K] or [E, rows, 1].
        """
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
        """Multiply values by a scale in place, without expanding the scale.

        Args:
            values: [E, rows, K].
            scale: Scale in the canonical shape.

        Returns:
            ``values``.
        """
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
    """(begin, end, group size) of the full groups together, and of the partial group after them."""
    full = size // group * group
    return [(begin, end, step) for begin, end, step in ((0, full, group), (full, size, size - full)) if begin < end]


def _check_parts(rows: int, parts: int) -> None:
    check_instance("parts", parts, int)
    if parts < 1 or rows % parts:
        raise TensorError(f"q has {rows} rows, expected a multiple of parts = {parts}")


def _check_g_idx(key: QuantKey, g_idx: Tensor | None, like: Tensor) -> None:
    if (g_idx is not None) != key.permuted:
        raise TensorError(f"g_idx is {'missing' if g_idx is None else 'given'}, the key is {key}")
    if g_idx is not None:
        check_shape("g_idx", g_idx, (like.shape[0], like.shape[2]))


def _as_grid(scale: Tensor | None, desc: ScaleDesc, x: Tensor) -> Tensor | None:
    """Scale of activations, possibly a scalar, in the canonical shape of [1, M, K]."""
    shape = scale_shape(desc, 1, x.shape[0], x.shape[1])
    if scale is None:
        return None
    if scale.numel() == 1:
        return scale.reshape([1] * len(shape)).expand(shape)
    check_shape("scale", scale, shape[1:])
    return scale[None]


# ------------------------------------------------------------------ scales


def _divided(
    x: Tensor, counted: Tensor, key: QuantKey, parts: int, scale2: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """``x`` [E, rows, K] divided by its second scale, and that scale: computed from ``counted`` unless given."""
    if key.scale2 is None:
        if scale2 is not None:
            raise ConfigError(f"scale2 is given, the key is {key}")
        return x, None
    experts, rows, cols = x.shape
    grid = Grid.of(key.scale2, experts, rows, cols, parts)
    shape = scale_shape(key.scale2, experts, rows, cols, parts)
    if scale2 is None and not x.numel():
        return x, _store_scale(torch.zeros(shape, dtype=torch.float32, device=x.device), key.scale2.dtype)
    if scale2 is None:
        scale2 = second_scale(grid.groups(counted.float().abs()).amax(dim=(3, 5)), key).reshape(shape)
    check_shape("scale2", scale2, shape)
    check_dtype("scale2", scale2, (key.scale2.dtype,))
    return x / grid.spread(scale_values(scale2)), scale2


def _quantize(
    x: Tensor, key: QuantKey, parts: int, scale: Tensor | None = None, zero_point: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantize float32 ``x`` [E, rows, K] to unpacked codes, canonical scale and zero point."""
    experts, rows, cols = x.shape
    shape = scale_shape(key, experts, rows, cols, parts)
    if x.numel() == 0:
        empty = torch.zeros(shape, dtype=torch.float32, device=x.device)
        return _encode(x, key), _store_scale(empty, key.scale.dtype), None if key.symmetric else empty.to(torch.int32)
    grid = Grid.of(key.scale, experts, rows, cols, parts)
    groups = grid.groups(x)
    if scale is None:
        low, high = groups.amin(dim=(3, 5)), groups.amax(dim=(3, 5))
        scale, zero_point = scale_of_range(low, high, key)
    factor = grid.per_group(scale_values(scale))
    scaled = groups / factor
    if zero_point is not None:
        # Rounding precedes the zero point, as in integer hardware.
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
    """:func:`_quantize` with the group of each column given by ``g_idx`` [E, K]."""
    grid = Grid.of(key.scale, w.shape[0], w.shape[1], w.shape[2], parts)
    shape = (w.shape[0], parts * grid.grid_rows, groups or grid.grid_cols)
    if scale is None:
        rows = w.reshape(grid.experts, parts, grid.part_rows, grid.cols)
        rows = torch.nn.functional.pad(rows, (0, 0, 0, grid.grid_rows * grid.row - grid.part_rows))
        rows = rows.view(grid.experts, parts * grid.grid_rows, grid.row, grid.cols)
        index = g_idx.long()[:, None, :].expand(-1, shape[1], -1)
        nothing = w.new_zeros(shape)
        # A range always includes 0, so the minimum and maximum of a group may start with 0.
        low = nothing.scatter_reduce(2, index, rows.amin(dim=2), "amin")
        high = nothing.scatter_reduce(2, index, rows.amax(dim=2), "amax")
        scale, zero_point = scale_of_range(low, high, key)
    scaled = w / grid.spread(scale_values(scale), g_idx)
    if zero_point is not None:
        scaled = scaled.round_().add_(grid.spread(zero_point.float() - key.dtype.offset, g_idx))
    return _encode(scaled, key), scale, zero_point


def scale_of_range(low: Tensor, high: Tensor, key: QuantKey) -> tuple[Tensor, Tensor | None]:
    """Compute the stored scale and zero point of groups from their value range.

    Args:
        low: Smallest element of each group.
        high: Largest element of each group.
        key: Quantization key.

    Returns:
        Scale and zero point (None if the key is symmetric).
    """
    dtype = key.dtype
    if key.symmetric:
        amax = torch.maximum(low.abs(), high.abs()).float().clamp_min(AMAX_FLOOR)
        if key.scale.rounding != "up":
            return _exponents(amax, key), None
        # The divisor is a tensor: torch replaces division by a number with multiplication by its reciprocal on a GPU.
        return _store_scale(amax / torch.full_like(amax, dtype.max_value), key.scale.dtype), None
    low, high = low.float().clamp_max(0.0), high.float().clamp_min(0.0)
    width = (high - low).clamp_min(AMAX_FLOOR)
    width = torch.where(width.isinf(), torch.nan, width)  # With a zero point, an infinite scale would leave infinities.
    scale = _store_scale(width / torch.full_like(width, dtype.max_value - dtype.min_value), key.scale.dtype)
    zero_point = (dtype.min_value - low / scale_values(scale)).round()
    # Zero points are stored like codes, so offset-binary types shift them as well.
    zero_point = zero_point.clamp(dtype.min_value, dtype.max_value).nan_to_num(0.0)
    return scale, (zero_point + dtype.offset).to(torch.int32)


def _exponents(amax: Tensor, key: QuantKey) -> Tensor:
    """e8m0 codes of float32 ``amax`` for a key that rounds "down" or "even"."""
    mantissa, exponent = key.dtype.mantissa_bits, math.frexp(key.dtype.max_value)[1] - 1
    if not mantissa or not is_e8m0(key.scale.dtype):
        raise ConfigError(f"rounding must be 'up' except for float codes with e8m0 scales, but the key is {key}")
    bits = amax.view(torch.int32)
    if key.scale.rounding == "even":
        # Half of the last place of a code's mantissa.
        bits = bits + (1 << 22 - mantissa)
    codes = torch.where(amax.isfinite(), ((bits >> 23) - exponent).clamp(0, 254), 255)
    return codes.to(torch.uint8).view(key.scale.dtype)


def _store_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a float32 scale to the dtype of stored scales."""
    if is_e8m0(dtype):
        # Round up to the next power of two: the exponent field, plus one if any mantissa bit is set.
        bits = scale.float().view(torch.int32)
        codes = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
        codes = torch.where(scale.isfinite(), codes.clamp(0, 254), 255)  # e8m0 NaN where the scale is not finite
        return codes.to(torch.uint8).view(dtype)
    if dtype is torch.float32:
        return scale
    # A scale that rounds to zero would cause a division by zero.
    info = torch.finfo(dtype)
    if dtype.itemsize == 1:
        scale = torch.where(scale.isfinite(), scale.clamp_max(info.max), torch.nan)
        return scale.clamp_min(info.smallest_normal * info.eps).to(dtype)
    return scale.to(dtype).clamp_min(info.smallest_normal * info.eps)


def static_scales(low: Tensor, high: Tensor, key: QuantKey) -> dict[str, Tensor]:
    """Compute static scales and zero points of activations from their value range.

    Args:
        low: [E], smallest activation of each expert.
        high: [E], largest activation of each expert.
        key: Quantization key of the activations.

    Returns:
        Tensors [E] by the argument names of :func:`quantize_tensor`, scales in float32; empty if all are dynamic.
    """
    found: dict[str, Tensor] = {}
    low, high = low.float(), high.float()
    if key.scale2 is not None and key.scale2.static:
        found["scale2"] = scale_values(second_scale(torch.maximum(low.abs(), high.abs()), key))
        low, high = low / found["scale2"], high / found["scale2"]
    if key.scale.static:
        scale, zero_point = scale_of_range(low, high, key)
        found["scale"] = scale_values(scale)
        found |= {} if zero_point is None else {"zero_point": zero_point}
    return found


def second_scale(amax: Tensor, key: QuantKey) -> Tensor:
    """Compute the stored second scale of groups from their largest magnitude.

    With it, the largest element is the largest code times the largest 8-bit scale, or times 1 for wider scales.

    Args:
        amax: float32, largest magnitude of the elements that share a second scale.
        key: Quantization key with two levels of scales.

    Returns:
        Tensor of the same shape.

    Raises:
        ConfigError: The key has one level of scales.
    """
    if key.scale2 is None:
        raise ConfigError(f"the key has no second scale; got {key}")
    amax = torch.where(amax.isfinite(), amax.clamp_min(AMAX_FLOOR), torch.nan)
    narrow = key.scale.dtype.is_floating_point and key.scale.dtype.itemsize == 1
    largest = key.dtype.max_value * (torch.finfo(key.scale.dtype).max if narrow else 1.0)
    return _store_scale(amax / torch.full_like(amax, largest), key.scale2.dtype)


def scale_values(scale: Tensor) -> Tensor:
    """Convert a stored scale to float32.

    Args:
        scale: The stored scale.

    Returns:
        float32 tensor of the same shape.
    """
    return e8m0_to_float32(scale) if is_e8m0(scale.dtype) else scale.float()


# ------------------------------------------------------------------ elements


def _encode(scaled: Tensor, key: QuantKey) -> Tensor:
    """Unpacked codes of values already divided by their scale, with the zero point added."""
    dtype = key.dtype
    if dtype.kind is NumberKind.FLOAT:
        if dtype.storage.is_floating_point:
            return scaled.clamp(dtype.min_value, dtype.max_value).to(dtype.storage)
        # Boundaries between magnitudes. Ties go to the even code: every second boundary belongs to the upper one.
        known = torch.tensor(dtype.magnitudes, dtype=torch.float32, device="cpu")
        upper = (known[1:] + known[:-1]) / 2
        upper[1::2] = torch.nextafter(upper[1::2], upper.new_zeros(()))
        magnitude = torch.bucketize(scaled.abs().clamp_max(dtype.max_value).contiguous(), upper.to(scaled.device))
        return (magnitude + (1 << dtype.bits - 1) * torch.signbit(scaled)).to(torch.uint8)
    # An integer cannot be NaN: the code is 0, and the scale is NaN.
    codes = scaled.round().clamp(dtype.min_value, dtype.max_value).nan_to_num(0.0) + dtype.offset
    if dtype.kind is NumberKind.INT and key.packing is not None:
        return codes.to(torch.int16).bitwise_and(2**dtype.bits - 1).to(torch.uint8)
    return codes.to(dtype.storage)


def _decode(codes: Tensor, key: QuantKey, wide: torch.dtype) -> Tensor:
    """Values of unpacked codes as a new tensor, before subtraction of the zero point."""
    dtype = key.dtype
    if dtype.kind is NumberKind.FLOAT:
        if dtype.name == "e4m3":
            return decode_e4m3(codes).to(wide)
        if dtype.storage.is_floating_point:
            return codes.to(wide)
        table = torch.tensor(dtype.magnitudes, dtype=wide, device=codes.device)
        return torch.cat((table, -table)).index_select(0, codes.flatten().int()).view(codes.shape)
    if dtype.kind is NumberKind.INT and key.packing is not None:
        half = 2 ** (dtype.bits - 1)
        return torch.bitwise_xor(codes.to(torch.int16), half).sub_(half).to(wide)
    values = codes.to(wide)
    if key.symmetric and dtype.offset:
        values.sub_(dtype.offset)
    return values


def _pack(codes: Tensor, key: QuantKey) -> Tensor:
    """Pack codes [E, rows, K] into the key's storage."""
    packing = key.packing
    if packing is None:
        return codes
    along = _axis(packing)
    count = packing.values_per_word
    size = codes.shape[along]
    if packing.axis == "n" and size % count:
        raise TensorError(f"q has {size} rows, expected a multiple of {count}, the values per packed word")
    missing = -size % count
    if missing:
        codes = torch.nn.functional.pad(codes, (0, missing))
    codes = codes.reshape(*codes.shape[:along], codes.shape[along] // count, count, *codes.shape[along + 1 :])
    # torch has no unsigned 32-bit shifts: words are assembled in int64, and their low bits are kept.
    shifts = key.dtype.bits * torch.arange(count, device=codes.device)
    shifts = shifts if along == 2 else shifts[:, None]
    if packing.storage is torch.uint8 and count == 2:
        low, high = codes.unbind(along + 1)
        return low | (high << key.dtype.bits)
    words = (codes.long() << shifts).sum(dim=along + 1)
    return words.to(packing.storage)


def _unpack(q: Tensor, key: QuantKey, cols: int | None) -> Tensor:
    """Unpack storage ``q`` to codes [E, rows, K]."""
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
