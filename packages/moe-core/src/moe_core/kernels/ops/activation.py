"""The activation between the two products of an expert as one kernel, with bias."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_core.kernels.ops._backend import use_triton
from moe_core.kernels.ops._rows import FLOATS, Rows, check_output
from moe_core.spec.activation import ActivationParams, MoEActivation


def fused_activation(
    activation: MoEActivation,
    x: Tensor,
    *,
    params: ActivationParams | None = None,
    bias: Tensor | None = None,
    row_experts: Tensor | None = None,
    row_counts: Tensor | None = None,
    out: Tensor | None = None,
    pdl: bool = False,
    backend: str = "auto",
) -> Tensor:
    """``activation(x + bias)``: ``x`` [P, 2N] (gated; else [P, N]) or batched [B, T, 2N] -> [P, N] or [B, T, N].

    - ``x``: bfloat16, float16 or float32, any strides; computed in float32 and rounded once, to ``out``'s dtype
    - ``bias``: [2N] for every row, or [E, 2N] with ``row_experts`` [P] naming each row's expert (none: id out of
      range); in the batched form row b of the bias goes with batch b unless ``row_experts`` [B * T] is given
    - ``row_counts``: int [B] (or [1] for [P, 2N]), rows in use; rows beyond are neither read nor written
    - ``out``: default a new tensor of ``x``'s dtype
    - ``pdl``: start before the kernel before has ended (sm_90 and later)
    """
    rows = Rows(x, activation, params, bias, row_experts, row_counts)
    if out is None:
        out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    check_output("out", out, rows.shape, FLOATS, x)
    if not use_triton(x, backend):
        values = rows.values().to(out.dtype)
        used = rows.in_use()
        return out.copy_(values if used is None else torch.where(used, values, out))
    from moe_core.kernels.ops._quantize_launch import launch_groups

    launch_groups(rows, out, code="", scale_kind="", pdl=pdl)
    return out
