"""Marlin-class kernels: repacked INT4 and INT8 codes in groups, with 16-bit activations.

Weight codes are stored in tensor-core fragment order and dequantized in registers: see
``moe_core.kernels.gemm.marlin``. With activation order, columns are sorted by group at load and activations are
gathered to match. e4m3 activations (W4AFP8) are quantized and dequantized, then multiplied with the int4 codes in
bfloat16.
"""

from __future__ import annotations

import torch
from moe_core import (
    GATED,
    NON_GATED,
    TRITON,
    Claims,
    FusedMoEActivationFormat,
    cuda,
    kFp8DynamicTokenSym,
    kInt4Static,
)
from moe_core.api.experts import MarlinIntegerExperts

from moe_wna16.keys import BASES, every_key, in_order

_KEYS = tuple((every_key(base), None) for base in BASES)
_DTYPES = frozenset({torch.bfloat16, torch.float16})


class MarlinWNA16Experts(MarlinIntegerExperts):
    """Marlin-class WNA16, standard format."""

    claims = Claims(
        devices=(cuda(min=80),),
        keys=_KEYS,
        activations=GATED | NON_GATED,
        dtypes=_DTYPES,
        bias=True,
        expert_map=True,
        apply_router_weight_on_input=True,
        batch_invariant=True,
        rounds_scales=True,
        requires=(TRITON,),
        verified_on=("NVIDIA H100 (sm90)", "NVIDIA H200 (sm90)"),
    )


class BatchedMarlinWNA16Experts(MarlinIntegerExperts):
    """Marlin-class WNA16, batched format."""

    claims = Claims(
        devices=(cuda(min=80),),
        keys=_KEYS,
        activations=GATED | NON_GATED,
        dtypes=_DTYPES,
        bias=True,
        batch_invariant=True,
        rounds_scales=True,
        formats=frozenset({FusedMoEActivationFormat.BATCHED}),
        requires=(TRITON,),
        verified_on=("NVIDIA H100 (sm90)", "NVIDIA H200 (sm90)"),
    )


class MarlinW4AFp8Experts(MarlinIntegerExperts):
    """int4 codes with e4m3 activations per token, both formats."""

    claims = Claims(
        devices=(cuda(min=80),),
        keys=((in_order(kInt4Static), kFp8DynamicTokenSym),),
        activations=GATED | NON_GATED,
        dtypes=frozenset({torch.bfloat16}),
        bias=True,
        expert_map=True,
        apply_router_weight_on_input=True,
        batch_invariant=True,
        rounds_scales=True,
        formats=frozenset({FusedMoEActivationFormat.STANDARD, FusedMoEActivationFormat.BATCHED}),
        requires=(TRITON,),
        verified_on=("NVIDIA H100 (sm90)",),
        notes="products in bfloat16, to which a code times its scale is rounded",
    )
