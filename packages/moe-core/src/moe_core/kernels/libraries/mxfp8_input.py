"""Hidden states in MXFP8 for kernels that take more columns than the layer has."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moe_core.kernels.ops.quantize import quantize_activation
from moe_core.spec.quant_key import kMxfp8Dynamic
from moe_core.spec.workspace import WorkspaceSpec

#: columns that share a scale
GROUP = 32
#: e8m0 of 1.0
ONE = 127


def mxfp8_workspaces(num_tokens: int, hidden: int) -> tuple[WorkspaceSpec, ...]:
    """Scratch tensors of :func:`mxfp8_input` for at most ``num_tokens`` tokens."""
    return (
        WorkspaceSpec("x_values", (num_tokens * hidden,), torch.float8_e4m3fn),
        WorkspaceSpec("x_scales", (num_tokens * hidden // GROUP,), torch.uint8),
    )


def mxfp8_input(hidden_states: Tensor, hidden: int, workspace: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(codes [M, hidden] e4m3, scales [M, hidden / 32] uint8) of ``hidden_states`` [M, K], zeros from column K."""
    (tokens, columns), groups = hidden_states.shape, hidden // GROUP
    x = workspace["x_values"][: tokens * hidden].view(tokens, hidden)
    scale = workspace["x_scales"][: tokens * groups].view(tokens, groups)
    own = columns // GROUP
    quantize_activation(hidden_states, kMxfp8Dynamic, out=x[:, :columns], scale_out=scale[:, :own])
    if hidden != columns:
        x.view(torch.uint8)[:, columns:].zero_()
        scale[:, own:].fill_(ONE)
    return x, scale
