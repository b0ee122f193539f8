"""Tables of the tensors in which a tool stores quantized experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_core.checkpoint.experts.suffixes import INPUT_SCALES
from moe_core.checkpoint.experts.values import Values

Shape = tuple[int, ...]

#: Dtypes of scales and biases in floating point.
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Matrix:
    """Matrices of one size whose tensors are stored alike.

    Attributes:
        projections: Their projections, in the order of the rows of w13 or w2.
        rows: Rows (output features) of each.
        cols: Columns (input features) of each.
    """

    projections: tuple[str, ...]
    rows: int
    cols: int

    @property
    def is_fused(self) -> bool:
        """Whether gate and up are one matrix."""
        return "gate_up" in self.projections

    @property
    def parts(self) -> int:
        """Number of stacked matrices in the canonical weight: 2 for gate and up."""
        return 2 if self.is_fused else len(self.projections)


def scalar(matrix: Matrix) -> Sequence[Shape]:
    """Accepted shapes of a tensor with one value per matrix.

    Args:
        matrix: The matrix.

    Returns:
        The shapes.
    """
    return [(), (1,), (1, 1)]


def per_matrix(stored: Tensor, matrix: Matrix) -> Tensor:
    """Convert one value per matrix to canonical form.

    Args:
        stored: Values of n matrices.
        matrix: The matrix.

    Returns:
        float32 [n, 1].
    """
    return stored.float().reshape(-1, 1)


def as_float32(stored: Tensor, matrix: Matrix) -> Tensor:
    """Convert stored values to float32.

    Args:
        stored: The stored values.
        matrix: The matrix.

    Returns:
        The values in float32.
    """
    return stored.float()


@dataclass(frozen=True, eq=False)
class TensorRule:
    """One row of a format's table: a tensor that each projection has, and what it becomes.

    Several rows may have the same role. The row whose suffix and dtype a projection has applies to it.

    Attributes:
        suffix: Suffix of the tensor's name, or equivalent suffixes, the usual one first.
        shape: Returns the accepted shapes for a matrix, the usual one first.
        dtypes: Accepted dtypes.
        role: Field of :class:`~moe_core.spec.weights.MoEWeights` without its prefix ("scale" for ``w13_scale`` and
            ``w2_scale``), or "weight" for the codes.
        required: Whether a projection without the tensor is refused. Static activation scales and zero points are
            required only if the layer's activations use them, and biases only if the layer has biases.
        why: Reason for the shape, for messages; default the settings and sizes in config.json.
        values: Valid values; None if all are.
        arrange: Converts stored tensors of n experts ``[n, ...]`` to canonical ones ``[n, rows, ...]``; default as
            stored.
        reciprocal: Whether the file stores the divisor of the values, so that their reciprocal is loaded.
        multiple: Numbers that the matrix's (rows, columns) must be multiples of.
        by_rows: Whether the result has one entry per row, which is reordered if gate and up rows are interleaved.
        separate: For fused gate and up, whether up starts at a new entry (:class:`StoredAxis`).
        sliced: Axes of the matrix ("rows", "columns") along which a shard of the tensor can be read; the tensor is read
            whole along the others.
        read: Whether the tensor is loaded; otherwise it is only checked, and :meth:`QuantizedLayout.finish` reads it.
    """

    suffix: str | tuple[str, ...]
    shape: Callable[[Matrix], Sequence[Shape]]
    dtypes: tuple[torch.dtype, ...]
    role: str
    required: bool = True
    why: str = ""
    values: Values | None = Values.FINITE
    arrange: Callable[[Tensor, Matrix], Tensor] | None = None
    reciprocal: bool = False
    multiple: tuple[int, int] = (1, 1)
    by_rows: bool = True
    separate: bool = False
    sliced: tuple[str, ...] = ("rows", "columns")
    read: bool = True

    @property
    def suffixes(self) -> tuple[str, ...]:
        """All equivalent suffixes."""
        return (self.suffix,) if isinstance(self.suffix, str) else self.suffix


#: Rows that every format has.
COMMON = (
    TensorRule(
        INPUT_SCALES,
        scalar,
        FLOATS,
        "input_scale",
        why="one scale of all activations",
        values=Values.POSITIVE,
        arrange=per_matrix,
        by_rows=False,
    ),
    TensorRule("bias", lambda matrix: [(matrix.rows,)], FLOATS, "bias", arrange=as_float32),
)
