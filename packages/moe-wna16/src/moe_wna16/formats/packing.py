"""How one tool keeps codes, scales and zero points of an expert's linear module, as an interface.

Everything that differs between tools stands behind it; what is the same for all (finding, checking, loading) is
:mod:`moe_wna16.formats.wna16_layout`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

Shape = tuple[int, ...]

#: the widths of codes that are read
BITS = (4, 8)


@dataclass(frozen=True)
class Packing(ABC):
    """The tensors of a matrix [rows, cols] whose columns form ``groups``, as they lie in the file.

    What is stored is given for ``n`` matrices at a time, [n, ...].

    - ``bits`` of a code: 4 or 8
    - ``weight``, ``scale``: suffixes of the tensors' names; ``zero``: zero points, ``g_idx``: the group of each column,
      ``pre_scale``: factors of the inputs' columns; None where the tool keeps no such tensor
    - ``joint``: what stands before a suffix in the tensors' names
    - ``unset_g_idx``: a ``g_idx`` of -1 everywhere means columns that lie in order
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
        """Why a matrix of this size cannot be kept so, in one clause; None if it can."""
        return None

    @abstractmethod
    def weight_shape(self, rows: int, cols: int) -> Shape:
        """Shape of the codes in the file."""

    @abstractmethod
    def codes(self, stored: Tensor, cols: int) -> Tensor:
        """Canonical storage: uint8 [n, rows, cols] of 8 bits, [n, rows, ceil(cols/2)] of 4 bits."""

    def scale_shapes(self, rows: int, groups: int) -> Sequence[Shape]:
        """Shapes that scales may have in the file, the usual one first."""
        return [(rows, groups)]

    def scales(self, stored: Tensor, rows: int) -> Tensor:
        """Scales [n, rows, groups]."""
        return stored.reshape(len(stored), rows, -1)

    def zero_shapes(self, rows: int, groups: int, dtype: torch.dtype | None) -> Sequence[Shape]:
        """Shapes that zero points of ``dtype`` may have in the file, the usual one first."""
        return [(rows, groups)]

    def zeros(self, stored: Tensor, rows: int) -> Tensor:
        """Zero points [n, rows, groups], uint8 or int32: what is subtracted from a code."""
        raise NotImplementedError

    def other_version(self, zeros: Tensor) -> str | None:
        """What to say of a symmetric type's ``zeros`` that are those of another version of the tool; None if not so."""
        return None

    def refused_codes(self, stored: Tensor) -> Tensor | None:
        """Which elements of the file's codes are none of ``bits`` bits; None where every one is."""
        return None
