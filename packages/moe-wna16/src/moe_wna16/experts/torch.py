"""Plain torch: any device, and the real path on a CPU."""

from __future__ import annotations

import torch
from moe_core import GATED, NON_GATED, Claims, FusedMoEActivationFormat, any_device, kFp8DynamicTokenSym, kInt4Static
from moe_core.torch_experts import TorchExperts

from moe_wna16.keys import BASES, every_key, in_order


class TorchWNA16Experts(TorchExperts):
    """Every key of the scheme: zero points, activation order, scaled inputs; int4 with e4m3 activations too."""

    claims = Claims(
        devices=(any_device(),),
        keys=(*((every_key(base), None) for base in BASES), (in_order(kInt4Static), kFp8DynamicTokenSym)),
        activations=GATED | NON_GATED,
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
        bias=True,
        expert_map=True,
        apply_router_weight_on_input=True,
        lora=True,
        formats=frozenset({FusedMoEActivationFormat.STANDARD, FusedMoEActivationFormat.BATCHED}),
        cuda_graph=False,
        verified_on=("cpu",),
        notes="reads token counts on the host: no CUDA graphs",
    )
