"""The scheme ``plain``: 16-bit weights without scales, run by plain torch."""

from __future__ import annotations

import torch
from moe_core import (
    GATED,
    NON_GATED,
    Backend,
    Claims,
    FusedMoEActivationFormat,
    SchemeSpec,
    TorchExperts,
    any_device,
)


class PlainTorchExperts(TorchExperts):
    """Experts that moe-core computes; a scheme only adds the claims."""

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


# with one backend, no order is needed
SCHEME = SchemeSpec(
    name="plain",
    interface_api=(1, 0),
    package="moe-example-scheme",
    backends=(Backend("torch", (PlainTorchExperts,)),),
)
