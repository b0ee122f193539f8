"""Storage of e4m3 experts and scales: the table of tensors and their conversion to canonical form.

Scales become float32, exactly, except those of MXFP8, which stay e8m0 bytes.

Gate and up keep separate per-tensor scales ([E, 2]): nothing is requantized.

A per-tensor scale and a static activation scale must be greater than 0. The scale of a channel or a block may be 0 if
its weights are 0 too (a pruned channel). A zero scale over other weights is refused, since they cannot be recovered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
    FLOATS,
    ExpertStorage,
    LayerExperts,
    Matrix,
    QuantizedLayout,
    Shape,
    TensorRule,
    Values,
    is_interleaved,
    is_transposed,
    one_suffix,
    scalar,
    stored_matrix,
)
from torch import Tensor

#: Suffixes of the weight's scale, common ones first (short ones are of stacked experts).
WEIGHT_SCALES = ("weight_scale_inv", "weight_scale", "scale_inv", "scales_inv", "scale")
#: 32 elements along K that share an e8m0 exponent
MX_GROUP = GroupShape(1, 32)

#: Supported e4m3 activations, for messages.
E4M3_KINDS = "static by tensor, or dynamic by tensor, token or group"


def is_e4m3(key: QuantKey) -> bool:
    """Return whether a key quantizes to e4m3.

    Args:
        key: quantization of activations.
    """
    return key.dtype == kFp8Static128BlockSym.dtype


@dataclass(frozen=True)
class Fp8Storage(ExpertStorage):
    """Quantization of one layer's e4m3 experts; see the base class.

    Attributes:
        group: elements of a stored weight that share a scale.
        activation: quantization of the activations; None for 16-bit activations.
        why: origin of the quantization config, for messages.
        microscaling: the scales are e8m0 exponents and stay so (MXFP8).
        exponent_bytes: a scale stored as plain bytes is an e8m0 exponent.
        scale: usual suffix of the weight's scale, for messages.
    """

    supports_interleaved = True

    group: GroupShape
    activation: QuantKey | None
    why: str
    microscaling: bool = False
    exponent_bytes: bool = False
    scale: str = "weight_scale"

    def layout(self, layer: LayerExperts) -> QuantizedLayout:
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
                f"{layer.prefix} has interleaved gate and up rows and blocks of {block_rows} rows, expected an "
                "even number"
            )
        shared = block_rows > 1 and not mixed and _shares_block(layer, block_rows, transposed)
        rows = math.gcd(_stacked_rows(layer, transposed) // 2, block_rows) if shared else block_rows
        if mixed and block_rows > 1:
            rows = block_rows // 2  # a block holds the same number of gate and up rows
        key = kMxfp8Static if self.microscaling else kFp8Static128BlockSym.with_group(rows, block_cols)
        tensors = _Tensors(self, transposed, shared or mixed, mixed, rows)
        rules = (
            TensorRule(
                "weight",
                lambda matrix: [tensors.stored(matrix.rows, matrix.cols)],
                (torch.float8_e4m3fn,),
                "weight",
                arrange=(lambda stored, _: stored.mT) if transposed else None,
            ),
            TensorRule(
                (self.scale, *(suffix for suffix in WEIGHT_SCALES if suffix != self.scale)),
                tensors.scale_shapes,
                self._scale_dtypes(),
                "scale",
                values=Values.POSITIVE if self.group.is_per_tensor else Values.SCALE,
                arrange=tensors.scales,
                by_rows=block_rows <= 1 and not self.group.is_per_tensor,
                separate=True,
            ),
        )
        whole = shared or (mixed and block_rows > 1)
        return QuantizedLayout(layer, key, self.activation, self, rules, mixed, whole)

    def _scale_dtypes(self) -> tuple[torch.dtype, ...]:
        if self.microscaling:
            return (torch.uint8, torch.float8_e8m0fnu)
        # plain bytes are exponents only if the config states it
        exponents = (torch.float8_e8m0fnu, torch.uint8) if self.exponent_bytes else (torch.float8_e8m0fnu,)
        return (*FLOATS, *exponents)


@dataclass(frozen=True)
class _Tensors:
    """Shapes and values of a layer's stored tensors.

    Attributes:
        storage: quantization of the stored experts.
        transposed: matrices are stored [K, rows].
        joint: gate and up rows of one matrix are blocked together.
        mixed: gate and up rows are interleaved (gpt-oss).
        rows: rows that share a scale in canonical form; less than ``storage.group.row`` if gate and up share blocks.
    """

    storage: Fp8Storage
    transposed: bool
    joint: bool
    mixed: bool
    rows: int

    def stored(self, rows: int, cols: int) -> Shape:
        return (cols, rows) if self.transposed else (rows, cols)

    def scale_shapes(self, matrix: Matrix) -> Sequence[Shape]:
        """Return the accepted shapes of the projection's scale, the usual one first."""
        group = self.storage.group
        if group.is_per_tensor:
            return scalar(matrix)
        if group.is_per_row:
            return [self.stored(matrix.rows, 1), (matrix.rows,)]
        parts = 2 if matrix.is_fused and not self.joint else 1
        grid = (parts * -(-matrix.rows // parts // group.row), -(-matrix.cols // group.col))
        return [self.stored(*grid), (grid[0], 1, grid[1], 1)]

    def scales(self, stored: Tensor, matrix: Matrix) -> Tensor:
        """Convert stored scales [n, ...] to a projection's canonical scale rows.

        Per-tensor scales give one value for each matrix of the projection.
        """
        if self.storage.microscaling:
            exact = stored.view(torch.uint8)
        else:
            exact = e8m0_to_float32(stored) if is_e8m0(stored.dtype) else stored.float()
        group = self.storage.group
        if group.is_per_tensor:
            return exact.reshape(-1, 1).expand(-1, 2 if matrix.is_fused else 1)
        if group.is_per_row:
            return exact.reshape(-1, matrix.rows, 1)
        grid = exact.squeeze(4).squeeze(2) if exact.dim() == 5 else exact
        grid = grid.mT if self.transposed and exact.dim() == 3 else grid
        if self.mixed and matrix.is_fused:
            return grid if group.row == 1 else grid.repeat(1, 2, 1)
        if self.rows == group.row:
            return grid
        return grid.repeat_interleave(group.row // self.rows, dim=1)[:, : -(-matrix.rows // self.rows)]


def scale_suffix(layer: LayerExperts, projection: str) -> str | None:
    """Return the suffix of the projection's weight scale, None if it has none.

    Args:
        layer: experts of one layer.
        projection: name of the projection.

    Raises:
        CheckpointError: the projection has two weight scales.
    """
    return one_suffix(layer, projection, WEIGHT_SCALES)


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
