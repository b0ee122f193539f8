"""Scratch memory of `moe_fp8.kernels.upcast_moe`."""

from __future__ import annotations

import torch
from moe_core.ops.batch import batch_workspaces
from moe_core.ops.sort import sort_workspaces
from moe_core.workspace import WorkspaceSpec

from moe_fp8.kernels.upcast_rule import BLOCK_N, MAX_SPLIT_PROGRAMS, MIN_BLOCK_M

#: the dtype of float16 activations beside MXFP8 weights: pairs of bfloat16 halves (`upcast.arrange_halves`)
HALVES = torch.int32
#: rows of activations are padded to whole steps, of the intermediate also to whole tiles
_WIDTH = 128


def stored_dtype(dtype: torch.dtype, *, mxfp8_weights: bool, mxfp8_activations: bool) -> torch.dtype:
    """How the activations of a layer of ``dtype`` are stored: bfloat16 holds MXFP8's exactly."""
    if mxfp8_activations:
        return torch.bfloat16
    return HALVES if mxfp8_weights and dtype is torch.float16 else dtype


def _padded(columns: int) -> int:
    return -(-columns // _WIDTH) * _WIDTH


def upcast_workspaces(
    num_tokens: int,
    top_k: int,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    *,
    dtype: torch.dtype,
    output_dtype: torch.dtype,
    weighted: bool = False,
) -> tuple[WorkspaceSpec, ...]:
    """For at most ``num_tokens`` tokens; ``num_experts`` local ones; ``dtype`` of the activations as stored.

    ``weighted``: x gets its router weights before it is rounded to MXFP8.
    """
    pairs = num_tokens * top_k
    weighted_tokens = num_tokens if weighted else 0
    return (
        *sort_workspaces(pairs, num_experts, MIN_BLOCK_M),
        WorkspaceSpec("x_values", (num_tokens, _padded(hidden_size)), dtype),
        WorkspaceSpec("h_values", (pairs, _padded(intermediate_size)), dtype),
        WorkspaceSpec("parts", (MAX_SPLIT_PROGRAMS * MIN_BLOCK_M * 2 * BLOCK_N,), torch.float32),
        WorkspaceSpec("y", (pairs, hidden_size), output_dtype),
        WorkspaceSpec("x_weighted", (weighted_tokens, hidden_size), torch.float32),
        WorkspaceSpec("unit_weights", (weighted_tokens, 1), torch.float32),
    )


def upcast_batched_workspaces(
    capacity: int, num_experts: int, hidden_size: int, intermediate_size: int, *, dtype: torch.dtype
) -> tuple[WorkspaceSpec, ...]:
    """For ``num_experts`` local experts of ``capacity`` rows each."""
    rows = num_experts * capacity
    return (
        *batch_workspaces(num_experts, capacity, MIN_BLOCK_M),
        WorkspaceSpec("x_values", (rows, _padded(hidden_size)), dtype),
        WorkspaceSpec("h_values", (rows, _padded(intermediate_size)), dtype),
    )
