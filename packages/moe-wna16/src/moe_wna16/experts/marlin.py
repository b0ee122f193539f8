"""Marlin-class kernels: INT4 and INT8 codes in groups, repacked at load, with 16-bit activations.

Codes are put into the order in which the registers of the tensor cores hold them, and widened there: see
``moe_core.kernels.gemm.marlin``.  With an activation order, columns are put in the order of their groups at load, and
activations are gathered to match.  e4m3 activations (W4AFP8) are quantised and dequantised: int4 codes and they meet as
numbers of bfloat16.
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
    """Standard format."""

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
    """Batched format."""

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
