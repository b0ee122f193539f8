"""Plain torch: any device, and the production path on CPUs.

Weights stay as the checkpoint stores them. Each expert that receives tokens is dequantized to float32 for its matrix
products, so results carry the format's quantization error and almost no arithmetic error.
"""

from __future__ import annotations

import torch
from moe_core import (
    GATED,
    NON_GATED,
    Claims,
    FusedMoEActivationFormat,
    GroupShape,
    KeyPattern,
    TorchExperts,
    any_device,
    kFp8Dynamic64Sym,
    kFp8Dynamic128Sym,
    kFp8DynamicTensorSym,
    kFp8DynamicTokenSym,
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
    kMxfp8Dynamic,
    kMxfp8DynamicDown,
    kMxfp8DynamicEven,
    kMxfp8Static,
)

_SCALES = (torch.float32, torch.uint8)
#: blocks, keyed by width, which equals the activation group size
_WIDE = KeyPattern(kFp8Static128BlockSym, (GroupShape(128, 128), GroupShape(64, 128)), _SCALES)
_NARROW = KeyPattern(kFp8Static128BlockSym, (GroupShape(64, 64), GroupShape(128, 64)), _SCALES)
_ACTIVATIONS = (kFp8StaticTensorSym, kFp8DynamicTensorSym, kFp8DynamicTokenSym, None)


class TorchFp8Experts(TorchExperts):
    """e4m3 weights (tensor, channel, block or MXFP8 scales) with e4m3 or 16-bit activations."""

    claims = Claims(
        devices=(any_device(),),
        keys=(
            (_WIDE, kFp8Dynamic128Sym),
            (_NARROW, kFp8Dynamic64Sym),
            (_WIDE, None),
            (_NARROW, None),
            *((weight, a) for weight in (kFp8StaticTensorSym, kFp8StaticChannelSym) for a in _ACTIVATIONS),
            *((kMxfp8Static, a) for a in (kMxfp8Dynamic, kMxfp8DynamicEven, kMxfp8DynamicDown, None)),
        ),
        activations=GATED | NON_GATED,
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
        bias=True,
        expert_map=True,
        apply_router_weight_on_input=True,
        formats=frozenset({FusedMoEActivationFormat.STANDARD, FusedMoEActivationFormat.BATCHED}),
        lora=True,
        batch_invariant=True,
        cuda_graph=False,
        takes_quantized=True,
        verified_on=("cpu", "NVIDIA H100 (sm90)", "NVIDIA H200 (sm90)"),
        notes="reads token counts on the host: no CUDA graphs",
    )
