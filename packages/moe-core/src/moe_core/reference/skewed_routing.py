"""Random routing in which some experts are popular, for measurements and tests."""

from __future__ import annotations

import torch
from torch import Tensor


def skewed(scores: Tensor, exponent: float) -> Tensor:
    """Keys [M, E] of ``scores`` [M, E], drawn uniformly from [0, 1): the k largest of a row are the experts of a token.

    They are k draws without replacement in which the r-th most popular expert counts ``r ** -exponent`` (Zipf's law):
    a logarithm of that weight plus Gumbel noise, ``-log(-log(score))``, is largest with just that chance.  Of as many
    experts the same ones are popular at every call.  ``exponent`` 0: every expert alike.
    """
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(scores.shape[1], generator=generator, device="cpu").to(scores.device)
    # the largest number below 1 stands for 1, the smallest normal one for 0: no key is infinite
    noise = -(-scores.float().clamp(torch.finfo(torch.float32).tiny, 1 - 2.0**-24).log()).log()
    return noise - exponent * (1.0 + order).log()
