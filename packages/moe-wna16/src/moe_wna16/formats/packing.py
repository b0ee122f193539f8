"""Interface for a tool's storage of an expert's codes, scales and zero points.

It covers everything that differs between tools. :mod:`moe_wna16.formats.wna16_layout` implements what they share:
finding, checking and loading tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

Shape = tuple[int, ...]

#: supported bits per code
BITS = (4, 8)


@dataclass(frozen=True)
class Packing(ABC):
    """Stored tensors of matrices [rows, cols] whose columns form ``groups``.

    Methods take the stored tensors of ``n`` matrices at a time, [n, ...].

    Attributes:
        bits: bits per code, 4 or 8.
        joint: separator in front of a suffix in tensor names.
        weight: suffix of the codes.
        scale: suffix of the scales.
        zero: suffix of the zero points; None if the tool stores none.
        g_idx: suffix of the group of each column; None if the tool stores none.
        pre_scale: suffix of the factors of input columns; None if the tool stores none.
        unset_g_idx: a ``g_idx`` of -1 everywhere means ordered columns.
        weight_dtypes: accepted dtypes of the codes.
        zero_dtypes: accepted dtypes of the zero points.
    """

    bits: int

    joint: ClassVar[str] = "."
    weight: ClassVar[str]
    scale: ClassVar[str]
    zero: ClassVar[str | None] = None
    g_idx: ClassVar[str | None] = None
    pre_scale: ClassVar[str | None] = None
    unset_g_idx: ClassVar[bool] = False
    weight_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.int32,)
    zero_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.int32,)

    def unfit(self, rows: int, cols: int) -> str | None:
        """Return why a matrix of this size cannot be stored, or None if it can.

        Args:
            rows: rows of the matrix.
            cols: columns of the matrix.
        """
        return None

    @abstractmethod
    def weight_shape(self, rows: int, cols: int) -> Shape:
        """Return the stored shape of the codes.

        Args:
            rows: rows of the matrix.
            cols: columns of the matrix.
        """

    @abstractmethod
    def codes(self, stored: Tensor, cols: int) -> Tensor:
        """Convert codes to canonical storage.

        Args:
            stored: the tensor in the file.
            cols: columns of the matrix.

        Returns:
            uint8 [n, rows, cols] for 8 bits, [n, rows, ceil(cols/2)] for 4 bits.
        """

    def scale_shapes(self, rows: int, groups: int) -> Sequence[Shape]:
        """Return the accepted shapes of the scales, the usual one first.

        Args:
            rows: rows of the matrix.
            groups: number of groups.
        """
        return [(rows, groups)]

    def scales(self, stored: Tensor, rows: int) -> Tensor:
        """Convert scales to [n, rows, groups].

        Args:
            stored: the tensor in the file.
            rows: rows of the matrix.

        Returns:
            [n, rows, groups].
        """
        return stored.reshape(len(stored), rows, -1)

    def zero_shapes(self, rows: int, groups: int, dtype: torch.dtype | None) -> Sequence[Shape]:
        """Return the accepted shapes of the zero points, the usual one first.

        Args:
            rows: rows of the matrix.
            groups: number of groups.
            dtype: dtype of the zero points in the file.
        """
        return [(rows, groups)]

    def zeros(self, stored: Tensor, rows: int) -> Tensor:
        """Convert zero points to what is subtracted from a code.

        Args:
            stored: the tensor in the file.
            rows: rows of the matrix.

        Returns:
            uint8 or int32 [n, rows, groups].
        """
        raise NotImplementedError

    def other_version(self, zeros: Tensor) -> str | None:
        """Describe a symmetric type's zero points if they are those of another version of the tool.

        Args:
            zeros: converted zero points.

        Returns:
            The description, or None.
        """
        return None

    def refused_codes(self, stored: Tensor) -> Tensor | None:
        """Mark stored codes that exceed ``bits`` bits; None if none can.

        Args:
            stored: the tensor in the file.

        Returns:
            bool of the shape of ``stored``, or None.
        """
        return None
