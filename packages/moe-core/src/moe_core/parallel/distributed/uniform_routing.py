"""Expected number of ranks and experts that tokens go to, for uniform routing.

A token's k experts are any k of the E, all sets equally likely, independent of other tokens. A rank holds L of the E
experts. Of the C(E, k) sets of experts, C(E - L, k) contain none of its experts, so a token goes to it with probability
``p = 1 - C(E - L, k) / C(E, k)``. The number of ranks that a token goes to is the sum over all ranks of an indicator.
The expectation of a sum is the sum of the expectations, even if the terms are dependent: ``P * p`` for P ranks that
hold L experts each. With the experts of a whole domain in place of L, the same formula counts domains. An expert has at
least one of T independent tokens with probability ``1 - (1 - k / E)**T``.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache


def hit_probability(num_experts: int, held: int, top_k: int) -> Fraction:
    """Return the probability that a token chooses at least one of some experts.

    Args:
        num_experts: Number of experts E.
        held: Number of experts of interest.
        top_k: Number of experts per token.

    Returns:
        The exact probability.
    """
    return 1 - Fraction(math.comb(max(num_experts - held, 0), top_k), math.comb(num_experts, top_k))


@cache
def expected_ranks(num_experts: int, ep_size: int, top_k: int) -> Fraction:
    """Return the mean number of expert-parallel ranks that a token goes to.

    If ``ep_size`` does not divide E, the first ranks hold one expert more.

    Args:
        num_experts: Number of experts E.
        ep_size: Number of expert-parallel ranks.
        top_k: Number of experts per token.

    Returns:
        The exact mean.
    """
    each, more = divmod(num_experts, ep_size)
    return more * hit_probability(num_experts, each + 1, top_k) + (ep_size - more) * hit_probability(
        num_experts, each, top_k
    )


def active_experts(num_experts: int, held: int, top_k: int, tokens: int) -> float:
    """Return the mean number of experts that have at least one token.

    Args:
        num_experts: Number of experts E.
        held: Number of experts of interest.
        top_k: Number of experts per token.
        tokens: Number of tokens.

    Returns:
        The mean.
    """
    return held * (1 - (1 - top_k / num_experts) ** tokens)
