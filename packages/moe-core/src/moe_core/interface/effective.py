"""Optional methods of experts that compute with other numbers than the given ones, at most one rounding away.

A reference for the experts' outputs is computed with the numbers that they report: in the conformance kit, and where
the command line checks a layer.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from moe_core.interface.experts import FusedMoEExperts
from moe_core.spec.weights import MoEWeights


@runtime_checkable
class Requantizes(Protocol):
    """Experts that require coarser scales, or powers of two, also for activations.

    The notes of their claims state it. Their ``convert`` then only rearranges the result of :meth:`requantized`.
    """

    def requantized(self, weights: MoEWeights) -> MoEWeights:
        """Return the weights and the activation key that the experts compute with.

        Args:
            weights: Canonical weights.

        Returns:
            Canonical weights.
        """


@runtime_checkable
class BreaksTies(Protocol):
    """Experts whose quantizer rounds values halfway between two codes to one side.

    A library does so if it multiplies by the reciprocal of a float32 scale.
    """

    def break_ties(self, x: Tensor) -> Tensor:
        """Return hidden states with such values moved to that side, by at most 2**-20 of their value.

        Args:
            x: [M, K].

        Returns:
            [M, K].
        """


def effective_weights(experts: FusedMoEExperts, weights: MoEWeights) -> MoEWeights:
    """Return the weights that experts compute with.

    Args:
        experts: The experts.
        weights: Canonical weights.

    Returns:
        Canonical weights; the given ones unless the experts requantize them.
    """
    return experts.requantized(weights) if isinstance(experts, Requantizes) else weights


def effective_input(experts: FusedMoEExperts, x: Tensor) -> Tensor:
    """Return hidden states as the quantizer of experts sees them.

    Args:
        experts: The experts.
        x: [M, K].

    Returns:
        [M, K]; the given ones unless the experts break ties.
    """
    return experts.break_ties(x) if isinstance(experts, BreaksTies) else x
