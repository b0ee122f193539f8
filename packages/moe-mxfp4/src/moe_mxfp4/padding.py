"""What backends hold beyond a layer's own sizes."""

from __future__ import annotations

from abc import abstractmethod


class PaddedExperts:
    """Mixed into experts classes whose kernels need sizes of some multiple: they pad inside, and say to what."""

    @classmethod
    @abstractmethod
    def padded_sizes(cls, hidden_size: int, intermediate_size: int) -> tuple[int, int]:
        """(K, N) of the converted weights."""


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple that holds ``size``."""
    return -(-size // multiple) * multiple
