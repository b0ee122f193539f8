"""The scheme ``plain``: 16-bit weights without scales, run by plain torch."""

from __future__ import annotations

import torch
from moe_core import (
    GATED,
    NON_GATED,
    Backend,
    Claims,
    FusedMoEActivationFormat,
    Oracle,
    Scheme,
    TorchExperts,
    any_device,
)


class PlainTorchExperts(TorchExperts):
    """The computation is core's; what a scheme adds are the claims."""

    claims = Claims(
        devices=(any_device(),),
        keys=((None, None),),
        activations=GATED | NON_GATED,
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
        bias=True,
        apply_router_weight_on_input=True,
        formats=frozenset({FusedMoEActivationFormat.STANDARD, FusedMoEActivationFormat.BATCHED}),
        cuda_graph=False,
        verified_on=("cpu",),
    )


class PlainOracle(Oracle):
    """One backend, so the order needs no thought."""

    scheme = "plain"
    backends = (Backend("torch", (PlainTorchExperts,), "moe-example-scheme"),)


SCHEME = Scheme(name="plain", protocol=2, oracle=PlainOracle)
