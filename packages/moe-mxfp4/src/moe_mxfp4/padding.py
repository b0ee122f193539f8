"""Padding of backends beyond a layer's sizes."""

from __future__ import annotations

from abc import abstractmethod

from moe_core import FusedMoEExperts


class PaddedExperts(FusedMoEExperts):
    """Mixin for experts whose kernels need padded sizes; place it first among the bases."""

    @classmethod
    @abstractmethod
    def padded_sizes(cls, hidden_size: int, intermediate_size: int) -> tuple[int, int]:
        """Return (K, N) of the converted weights.

        Args:
            hidden_size: K of the layer.
            intermediate_size: N of the layer.
        """

    @property
    def hidden_size(self) -> int:
        """K of the converted weights."""
        return self.padded_sizes(self.config.hidden_size, self.config.intermediate_size)[0]

    @property
    def intermediate_size(self) -> int:
        """N of the converted weights."""
        return self.padded_sizes(self.config.hidden_size, self.config.intermediate_size)[1]


def round_up(size: int, multiple: int) -> int:
    """Round ``size`` up to a multiple.

    Args:
        size: size to round.
        multiple: positive factor of the result.

    Returns:
        The smallest multiple that is not below ``size``.
    """
    return -(-size // multiple) * multiple
