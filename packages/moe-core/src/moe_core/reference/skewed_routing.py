"""Random routing with popular experts, for benchmarks and tests."""

from __future__ import annotations

import torch
from torch import Tensor


def skewed(scores: Tensor, exponent: float) -> Tensor:
    """Make keys whose k largest entries per row select the experts of a token.

    The selection is k draws without replacement in which the r-th most popular expert has weight ``r ** -exponent``
    (Zipf's law). It works because the logarithm of that weight plus Gumbel noise, ``-log(-log(score))``, is largest
    with exactly that probability. For a given number of experts, the same experts are popular in every call.

    Args:
        scores: [M, E], drawn uniformly from [0, 1).
        exponent: Exponent of Zipf's law; 0: all experts are equally likely.

    Returns:
        [M, E].
    """
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(scores.shape[1], generator=generator, device="cpu").to(scores.device)
    # The largest number below 1 stands for 1, and the smallest normal number for 0, so that no key is infinite.
    noise = -(-scores.float().clamp(torch.finfo(torch.float32).tiny, 1 - 2.0**-24).log()).log()
    return noise - exponent * (1.0 + order).log()
