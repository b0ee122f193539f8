"""Interface for a tool's storage of an expert's codes, scales and zero points.

It covers everything that differs between tools. :mod:`moe_wna16.formats.wna16_layout` adds what they share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from moe_core.api.formats import Matrix, Shape, TensorRule
from torch import Tensor

#: supported bits per code
BITS = (4, 8)
#: dtypes of ``g_idx``
INDICES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Packing(ABC):
    """Stored tensors of matrices whose columns form groups.

    Attributes:
        bits: bits per code, 4 or 8.
        unset_g_idx: a ``g_idx`` of -1 everywhere means ordered columns.
    """

    bits: int

    unset_g_idx: ClassVar[bool] = False

    @abstractmethod
    def rules(self, group: int) -> tuple[TensorRule, ...]:
        """Return the table of the tensors, except of those that all formats have.

        Codes become canonical bytes, and zero points what is subtracted from a code.

        Args:
            group: columns that share a scale, -1 for a whole row.
        """

    def suffix(self, role: str) -> str | None:
        """Return the usual suffix of a tensor, None if the tool stores none.

        Args:
            role: role of the tensor.
        """
        return next((rule.suffixes[0] for rule in self.rules(-1) if rule.role == role), None)

    def other_version(self, zeros: Tensor) -> str | None:
        """Describe a symmetric type's zero points if they are those of another version of the tool.

        Args:
            zeros: converted zero points.

        Returns:
            The description, or None.
        """
        return None


def group_count(cols: int, group: int) -> int:
    """Return the number of groups in a row.

    Args:
        cols: columns of the matrix.
        group: columns per group, -1 for a whole row.
    """
    return 1 if group == -1 else -(-cols // group)


def by_rows(group: int) -> Callable[[Matrix], Sequence[Shape]]:
    """Return the accepted shapes of values stored [rows, groups], or [rows] for a single group.

    Args:
        group: columns per group, -1 for a whole row.
    """

    def shapes(matrix: Matrix) -> Sequence[Shape]:
        groups = group_count(matrix.cols, group)
        return [(matrix.rows, groups), *([(matrix.rows,)] if groups == 1 else [])]

    return shapes


def rows_first(stored: Tensor, matrix: Matrix) -> Tensor:
    """Convert stored values to [n, rows, groups].

    Args:
        stored: values of n matrices.
        matrix: the matrix.
    """
    return stored.reshape(len(stored), matrix.rows, -1)


def transposed(stored: Tensor, matrix: Matrix) -> Tensor:
    """Convert values stored [n, groups, rows] to [n, rows, groups].

    Args:
        stored: values of n matrices.
        matrix: the matrix.
    """
    return stored.mT


def g_idx(suffix: str) -> TensorRule:
    """Return the row for the group of each column, which :mod:`moe_wna16.formats.columns` reads.

    Args:
        suffix: suffix of the tensor.
    """
    return TensorRule(suffix, lambda m: [(m.cols,)], INDICES, "g_idx", required=False, sliced=(), read=False)
