"""What backends hold beyond a layer's own sizes."""

from __future__ import annotations

from abc import abstractmethod

from moe_core import FusedMoEExperts


class PaddedExperts(FusedMoEExperts):
    """First base of experts whose kernels need sizes of some multiple: they pad inside, and say to what."""

    @classmethod
    @abstractmethod
    def padded_sizes(cls, hidden_size: int, intermediate_size: int) -> tuple[int, int]:
        """(K, N) of the converted weights."""

    @property
    def hidden_size(self) -> int:
        """K of the converted weights."""
        return self.padded_sizes(self.config.hidden_size, self.config.intermediate_size)[0]

    @property
    def intermediate_size(self) -> int:
        """N of the converted weights."""
        return self.padded_sizes(self.config.hidden_size, self.config.intermediate_size)[1]


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple that holds ``size``."""
    return -(-size // multiple) * multiple
