"""Calls of the family's layers on meta tensors, for what is compiled without a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_core.gemm.launch import Activation
from moe_core.gemm.marlin.layer import Functions, MarlinMatrix, Rounding, marlin_fused_moe, marlin_workspaces
from moe_core.gemm.marlin.rule import VectorPlan
from moe_core.gemm.marlin.vector import VectorFunctions, vector_fused_moe
from moe_core.gemm.plan import TilePlan


def meta(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def call_layer(
    functions: Functions,
    w13: MarlinMatrix,
    w2: MarlinMatrix,
    plan: TilePlan,
    *,
    tokens: int,
    top_k: int,
    dtype: torch.dtype,
    batched: bool = False,
    activation: Activation | None = None,
    gathered: tuple[int, int] = (0, 0),
    rounding: Rounding | None = None,
) -> None:
    """``activation``: default silu for interleaved rows, else relu2_no_mul; ``gathered`` as in `marlin_workspaces`.

    With ``rounding`` x and h are bfloat16.
    """
    experts, hidden, size = w13.words.shape[0], w2.outputs, w13.outputs
    if activation is None:
        activation = Activation("silu" if w13.interleaved else "relu2_no_mul")
    rounded = None if rounding is None else torch.bfloat16
    specs = marlin_workspaces(
        tokens, top_k, experts, hidden, size, dtype, batched=batched, gathered=gathered, rounded=rounded
    )
    shape = (experts, tokens, hidden) if batched else (tokens, hidden)
    marlin_fused_moe(
        functions,
        meta(*shape, dtype=dtype),
        w13,
        w2,
        out=meta(*shape, dtype=dtype),
        workspace={spec.name: meta(*spec.shape, dtype=spec.dtype) for spec in specs},
        plan=plan,
        activation=activation,
        topk_weights=None if batched else meta(tokens, top_k, dtype=torch.float32),
        topk_ids=None if batched else meta(tokens, top_k, dtype=torch.int32),
        expert_num_tokens=meta(experts, dtype=torch.int32) if batched else None,
        rounding=rounding,
    )


def call_vectors(
    functions: VectorFunctions, w13: MarlinMatrix, w2: MarlinMatrix, plan: VectorPlan, *, top_k: int, dtype: torch.dtype
) -> None:
    """One token, with silu or relu2_no_mul as in :func:`call_layer`."""
    hidden, size = w2.outputs, w13.outputs
    vector_fused_moe(
        functions,
        meta(1, hidden, dtype=dtype),
        w13,
        w2,
        out=meta(1, hidden, dtype=dtype),
        workspace={"h": meta(top_k, size, dtype=dtype), "parts": meta(top_k * hidden, dtype=torch.float32)},
        plan=plan,
        activation=Activation("silu" if w13.interleaved else "relu2_no_mul"),
        topk_weights=meta(1, top_k, dtype=torch.float32),
        topk_ids=meta(1, top_k, dtype=torch.int32),
    )
