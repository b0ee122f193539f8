"""Storage of e4m3 experts and scales: validation and conversion to canonical form.

Scales become float32, exactly, except those of MXFP8, which stay e8m0 bytes.

Gate and up keep separate per-tensor scales ([E, 2]): nothing is requantized. Both read the same activations. If their
static activation scales differ, the maximum is used, since it is the only one of the two with which neither clips.

A per-tensor scale and a static activation scale must be greater than 0. The scale of a channel or a block may be 0 if
its weights are 0 too (a pruned channel). A zero scale over other weights is refused, since they cannot be recovered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from moe_core import (
    CheckpointError,
    GroupShape,
    QuantKey,
    e8m0_to_float32,
    is_e8m0,
    kFp8Static128BlockSym,
    kMxfp8Static,
)
from moe_core.api.formats import (
    INPUT_SCALES,
    ZERO_POINTS,
    Asking,
    Axes,
    ExpertMatrices,
    ExpertStorage,
    LayerExperts,
    QuantizedLayout,
    StoredAxis,
    Values,
    check_expert_tensor,
    checked,
    gate_rows_first,
    is_interleaved,
    is_transposed,
    missing,
    one_suffix,
    refuse_lost_weights,
    refuse_mixed,
    refuse_zero_points,
    stored_matrix,
)
from torch import Tensor

#: Suffixes of the weight's scale, common ones first (short ones are of stacked experts).
WEIGHT_SCALES = ("weight_scale_inv", "weight_scale", "scale_inv", "scales_inv", "scale")
#: 32 elements along K that share an e8m0 exponent
MX_GROUP = GroupShape(1, 32)

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Fp8Storage(ExpertStorage):
    """Quantization of one layer's e4m3 experts; see the base class.

    Attributes:
        group: elements of a stored weight that share a scale.
        activation: quantization of the activations; None for 16-bit activations.
        why: origin of these settings, for messages.
        microscaling: the scales are e8m0 exponents and stay so (MXFP8).
        exponent_bytes: a scale stored as plain bytes is an e8m0 exponent.
        scale: usual suffix of the weight's scale, for messages.
    """

    interleaved = True

    group: GroupShape
    activation: QuantKey | None
    why: str
    microscaling: bool = False
    exponent_bytes: bool = False
    scale: str = "weight_scale"

    def layout(self, layer: LayerExperts) -> Fp8Layout:
        block_rows, block_cols = self.group.row, self.group.col
        transposed = is_transposed(layer)
        if transposed and block_rows > 1 and block_rows != block_cols:
            raise CheckpointError(
                f"{layer.prefix} is stored transposed with blocks of {block_rows}x{block_cols}: "
                "which of the two counts output rows is not known"
            )
        mixed = is_interleaved(layer)
        if mixed and block_rows > 1 and block_rows % 2:
            raise CheckpointError(
                f"{layer.prefix} has gate and up rows in turns and blocks of {block_rows} rows, expected an even number"
            )
        shared = block_rows > 1 and not mixed and _shares_block(layer, block_rows, transposed)
        rows = math.gcd(_stacked_rows(layer, transposed) // 2, block_rows) if shared else block_rows
        if mixed and block_rows > 1:
            rows = block_rows // 2  # a block holds the same number of gate and up rows
        key = kMxfp8Static if self.microscaling else kFp8Static128BlockSym.with_group(rows, block_cols)
        return Fp8Layout(layer, key, self.activation, self, transposed, shared, rows, mixed)


@dataclass(frozen=True, eq=False)
class Fp8Layout(QuantizedLayout):
    """Layout of the layer's matrices and scales.

    Attributes:
        storage: quantization of the stored experts.
        transposed: matrices are stored [K, rows].
        shared: gate and up are one matrix whose blocks straddle both.
        rows: rows that share a scale in canonical form; less than ``storage.group.row`` if ``shared``.
        mixed: gate and up rows are interleaved (gpt-oss).
    """

    storage: Fp8Storage
    transposed: bool
    shared: bool
    rows: int
    mixed: bool

    def check(self, projection: str, size: tuple[int, int], experts: Sequence[int], *, has_bias: bool) -> None:
        layer, storage = self.layer, self.storage
        rows, cols = size
        refuse_mixed(layer, projection, _FLOATS, (torch.float8_e4m3fn,))
        check_expert_tensor(layer, projection, "weight", self._stored(rows, cols), (torch.float8_e4m3fn,), self.sized)
        scale = scale_suffix(layer, projection)
        if scale is None:
            raise CheckpointError(f"{missing(layer, projection, storage.scale)} ({storage.why})")
        shape, *also = self._scale_shapes(projection, rows, cols)
        check_expert_tensor(layer, projection, scale, shape, self._scale_dtypes(), storage.why, also=also)
        if self.is_static:
            static = input_suffix(layer, projection)
            if static is None:
                raise CheckpointError(f"{missing(layer, projection, INPUT_SCALES[0])} ({storage.why})")
            one = "one scale of all activations"
            check_expert_tensor(layer, projection, static, (), _FLOATS, one, also=((1,), (1, 1)))
        if has_bias:
            check_expert_tensor(layer, projection, "bias", (rows,), _FLOATS, self.sized)
        self._check_others(projection, scale, experts)

    def stack(
        self,
        name: str,
        projections: tuple[str, ...],
        matrices: ExpertMatrices,
        experts: Sequence[int],
        device: torch.device | str,
        *,
        has_bias: bool,
    ) -> Asking[dict[str, Tensor]]:
        layer, ask = self.layer, partial(checked, self.layer, projections)
        scale = _required(scale_suffix(layer, projections[0]))
        values = Values.POSITIVE if self.storage.group.is_per_tensor else Values.SCALE
        rows, cols = matrices.sizes[projections[0]]
        mixed = self.mixed and "gate_up" in projections

        def in_order(stored: Tensor) -> Tensor:
            return gate_rows_first(stored, dim=1) if mixed else stored

        arrange = (
            (lambda stored: in_order(stored.mT if self.transposed else stored)) if self.transposed or mixed else None
        )
        tensors = {name: (yield from ask("weight", Values.FINITE, arrange=arrange))}
        tensors[f"{name}_scale"] = yield from ask(
            scale, values, arrange=lambda stored: self._scales(stored, projections[0], rows, cols)
        )
        if not self.storage.microscaling and not self.storage.group.is_per_tensor:
            refuse_lost_weights(
                layer,
                projections,
                scale,
                tensors[name],
                tensors[f"{name}_scale"],
                self.weight_key,
                experts=experts,
                is_zero=lambda codes: (codes.view(torch.uint8) & 0x7F) == 0,
                interleaved=mixed,
            )
        if self.is_static:
            static = _required(input_suffix(layer, projections[0]))
            both = yield from ask(static, Values.POSITIVE, arrange=lambda stored: stored.float().reshape(-1, 1))
            tensors[f"{name}_input_scale"] = both.amax(dim=1)
        if has_bias:
            tensors[f"{name}_bias"] = yield from ask(
                "bias", Values.FINITE, arrange=lambda stored: in_order(stored.float())
            )
        return tensors

    # ------------------------------------------------------------------ shapes

    @property
    def interleaved(self) -> bool:
        return self.mixed

    def axes(self, projection: str) -> Mapping[str, Axes] | None:
        if self.shared or (self.mixed and self.storage.group.row > 1):
            return None
        layer, group = self.layer, self.storage.group
        first, second = (1, 0) if self.transposed else (0, 1)
        found: dict[str, Axes] = {
            "weight": (StoredAxis(first), StoredAxis(second)),
            "bias": (StoredAxis(0), None),
        }
        scale = _required(scale_suffix(layer, projection))
        dims = len(layer.shape(projection, scale))
        if group.is_per_row:
            found[scale] = (StoredAxis(first if dims == 2 else 0), None)
        elif not group.is_per_tensor:
            first, second = (0, 2) if dims == 4 else (first, second)
            found[scale] = (StoredAxis(first, group.row, separate=True), StoredAxis(second, group.col))
        return found

    def _stored(self, rows: int, cols: int) -> tuple[int, int]:
        return (cols, rows) if self.transposed else (rows, cols)

    def _scale_shapes(self, projection: str, rows: int, cols: int) -> list[tuple[int, ...]]:
        """Return the accepted shapes of the projection's scale, the usual one first."""
        group = self.storage.group
        if group.is_per_tensor:
            return [(), (1,), (1, 1)]
        if group.is_per_row:
            return [self._stored(rows, 1), (rows,)]
        parts = 2 if projection == "gate_up" and not (self.shared or self.mixed) else 1
        grid = (parts * -(-rows // parts // group.row), -(-cols // group.col))
        return [self._stored(*grid), (grid[0], 1, grid[1], 1)]

    def _scale_dtypes(self) -> tuple[torch.dtype, ...]:
        if self.storage.microscaling:
            return (torch.uint8, torch.float8_e8m0fnu)
        # plain bytes are exponents only if the config states it
        exponents = (torch.float8_e8m0fnu, torch.uint8) if self.storage.exponent_bytes else (torch.float8_e8m0fnu,)
        return (*_FLOATS, *exponents)

    def _scales(self, stored: Tensor, projection: str, rows: int, cols: int) -> Tensor:
        """Convert stored scales [n, ...] to a projection's canonical scale rows.

        Per-tensor scales give one value for each matrix of the projection.
        """
        if self.storage.microscaling:
            exact = stored.view(torch.uint8)
        else:
            exact = e8m0_to_float32(stored) if is_e8m0(stored.dtype) else stored.float()
        group, mixed = self.storage.group, self.mixed and projection == "gate_up"
        if group.is_per_tensor:
            return exact.reshape(-1, 1).expand(-1, 2 if projection == "gate_up" else 1)
        if group.is_per_row:
            exact = exact.reshape(-1, rows, 1)
            return gate_rows_first(exact, dim=1) if mixed else exact
        grid = exact.squeeze(4).squeeze(2) if exact.dim() == 5 else exact
        grid = grid.mT if self.transposed and exact.dim() == 3 else grid
        if mixed:
            return gate_rows_first(grid, dim=1) if group.row == 1 else grid.repeat(1, 2, 1)
        if self.rows == group.row:
            return grid
        return grid.repeat_interleave(group.row // self.rows, dim=1)[:, : -(-rows // self.rows)]

    # ------------------------------------------------------------------ extra tensors

    def _check_others(self, projection: str, scale: str, experts: Sequence[int]) -> None:
        """Check that no tensor is ignored that would change the values."""
        layer = self.layer
        for suffix in layer.suffixes(projection):
            name = layer.name(0, projection, suffix)
            if suffix in ("weight", "bias", scale):
                continue
            if suffix in INPUT_SCALES:
                if not self.is_static:
                    self.warn_of_unused(projection, suffix)
            elif suffix in ZERO_POINTS:
                refuse_zero_points(layer, projection, suffix, experts)
            else:
                stored = layer.stored_dtype(projection, suffix)
                raise CheckpointError(f"{name} is {stored}: no FP8 format has such a tensor")


def scale_suffix(layer: LayerExperts, projection: str) -> str | None:
    """Return the suffix of the projection's weight scale, None if it has none.

    Args:
        layer: experts of one layer.
        projection: name of the projection.

    Raises:
        CheckpointError: the projection has two weight scales.
    """
    return one_suffix(layer, projection, WEIGHT_SCALES)


def input_suffix(layer: LayerExperts, projection: str) -> str | None:
    """Return the suffix of the projection's static activation scale, None if it has none.

    Args:
        layer: experts of one layer.
        projection: name of the projection.

    Raises:
        CheckpointError: the projection has two activation scales.
    """
    return one_suffix(layer, projection, INPUT_SCALES)


def _required(suffix: str | None) -> str:
    if suffix is None:
        raise CheckpointError("a scale is missing")
    return suffix


def _stacked_rows(layer: LayerExperts, transposed: bool) -> int:
    return stored_matrix(layer, "gate_up")[1 if transposed else 0]


def _shares_block(layer: LayerExperts, block_rows: int, transposed: bool) -> bool:
    """Return whether a row of blocks holds both gate and up rows.

    This is the case if they are one matrix and N is not divisible by the block height.
    """
    suffix = scale_suffix(layer, "gate_up") if "gate_up" in layer.projections else None
    if suffix is None:
        return False
    rows = _stacked_rows(layer, transposed)
    half = rows // 2
    if rows % 2 or half % block_rows == 0:
        return False
    together, separate = -(-rows // block_rows), 2 * -(-half // block_rows)
    shape = layer.shape("gate_up", suffix)
    found = shape[-1 if transposed else 0] if len(shape) == 2 else 0
    if together == separate == found:
        raise CheckpointError(
            f"{layer.name(0, 'gate_up', suffix)}: {found} rows of {block_rows}-row blocks over {half} gate and "
            f"{half} up rows can mean separate blocks of gate and up or blocks of both; which one is not known"
        )
    return found == together
