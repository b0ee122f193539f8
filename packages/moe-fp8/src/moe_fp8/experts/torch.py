"""Plain torch: any device, and the real path on a CPU.

Weights stay as the checkpoint has them; each expert that has tokens is dequantised to float32 for its
matrix products, so results carry the format's error and next to none of the arithmetic's.
"""

from __future__ import annotations

import torch
from moe_core import GATED, NON_GATED, Claims, FusedMoEActivationFormat, KeyPattern, any_device
from moe_core.quant_key import GroupShape, kFp8Dynamic64Sym, kFp8Dynamic128Sym, kFp8Static128BlockSym
from moe_core.torch_experts import TorchExperts

_WIDE_BLOCKS = (GroupShape(128, 128), GroupShape(64, 128))
_NARROW_BLOCKS = (GroupShape(64, 64), GroupShape(128, 64))


class TorchFp8Experts(TorchExperts):
    """Block-quantised e4m3 weights with dynamic activation groups as wide as a block."""

    claims = Claims(
        devices=(any_device(),),
        keys=(
            (KeyPattern(kFp8Static128BlockSym, group_shapes=_WIDE_BLOCKS), kFp8Dynamic128Sym),
            (KeyPattern(kFp8Static128BlockSym, group_shapes=_NARROW_BLOCKS), kFp8Dynamic64Sym),
        ),
        activations=GATED | NON_GATED,
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
        bias=True,
        expert_map=True,
        apply_router_weight_on_input=True,
        formats=frozenset({FusedMoEActivationFormat.STANDARD, FusedMoEActivationFormat.BATCHED}),
        cuda_graph=False,
        verified_on=("cpu", "NVIDIA H200 (sm90)"),
        notes="reads token counts on the host: no CUDA graphs",
    )
