"""Fused activation between the two GEMMs of an expert, with bias."""

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
    """Compute ``activation(x + bias)`` in one kernel.

    The computation is in float32 and is rounded once, to the dtype of ``out``.

    Args:
        activation: Activation function.
        x: Input [P, 2N] (gated) or [P, N], or batched [B, T, 2N]; bfloat16, float16 or float32, any strides.
        params: Parameters of the activation.
        bias: Bias [2N] for every row, or [E, 2N] per expert. In the batched form row b of the bias applies to batch b
            unless ``row_experts`` is given.
        row_experts: Expert of each row [P] ([B * T] in the batched form), for a bias per expert. Ids out of range have
            no bias.
        row_counts: Number of valid rows, integer [B] (or [1] for [P, 2N]). Later rows are neither read nor written.
        out: Tensor to write to; a new tensor of the dtype of ``x`` by default.
        pdl: Use programmatic dependent launch: start before the previous kernel has ended (sm_90 and later).
        backend: ``"auto"``, ``"triton"`` or ``"torch"``.

    Returns:
        Result [P, N] or [B, T, N].
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
