"""Hidden states in MXFP8 for kernels that require more columns than the layer has."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moe_core.kernels.ops.quantize import quantize_activation
from moe_core.spec.quant_key import kMxfp8Dynamic
from moe_core.spec.workspace import WorkspaceSpec

#: number of columns that share a scale
GROUP = 32
#: e8m0 encoding of 1.0
ONE = 127


def mxfp8_workspaces(num_tokens: int, hidden: int) -> tuple[WorkspaceSpec, ...]:
    """Return the workspaces of :func:`mxfp8_input`.

    Args:
        num_tokens: Largest number of tokens.
        hidden: Columns of the result.

    Returns:
        Specifications of the tensors that :func:`mxfp8_input` takes as ``workspace``.
    """
    return (
        WorkspaceSpec("x_values", (num_tokens * hidden,), torch.float8_e4m3fn),
        WorkspaceSpec("x_scales", (num_tokens * hidden // GROUP,), torch.uint8),
    )


def mxfp8_input(hidden_states: Tensor, hidden: int, workspace: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Quantize hidden states to MXFP8 and pad them with zero columns.

    Args:
        hidden_states: Hidden states [M, K].
        hidden: Columns of the result.
        workspace: Tensors of :func:`mxfp8_workspaces`, by name.

    Returns:
        ``(codes, scales)``: [M, hidden] e4m3 and [M, hidden / 32] uint8.
    """
    (tokens, columns), groups = hidden_states.shape, hidden // GROUP
    x = workspace["x_values"][: tokens * hidden].view(tokens, hidden)
    scale = workspace["x_scales"][: tokens * groups].view(tokens, groups)
    own = columns // GROUP
    quantize_activation(hidden_states, kMxfp8Dynamic, out=x[:, :columns], scale_out=scale[:, :own])
    if hidden != columns:
        x.view(torch.uint8)[:, columns:].zero_()
        scale[:, own:].fill_(ONE)
    return x, scale
