"""Activation schemes: how the hidden states x and the intermediate h become operands of the two GEMMs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from moe_core.kernels.gemm.fused.call import Call
from moe_core.kernels.gemm.tiles.launch import OperandA, Result, Rows
from moe_core.kernels.gemm.workspaces import (
    BEFORE_GEMM2,
    FROM_GEMM2,
    lora_workspaces,
    order_workspaces,
    split_k_workspace,
)
from moe_core.kernels.ops.sort import Schedule
from moe_core.spec.config import FusedMoEActivationFormat, FusedMoEConfig
from moe_core.spec.workspace import WorkspaceSpec

#: columns of a tile of gemm1, and what rows of x and h are padded to a multiple of
TILE = 128


@dataclass(frozen=True)
class CallShape:
    """A layer's largest call: ``num_tokens`` M, or rows T_max of each expert's buffer."""

    config: FusedMoEConfig
    num_tokens: int

    @property
    def batched(self) -> bool:
        return self.config.activation_format is FusedMoEActivationFormat.BATCHED

    @property
    def rows(self) -> int:
        """Rows of x."""
        return self.config.local_experts * self.num_tokens if self.batched else self.num_tokens

    @property
    def pairs(self) -> int:
        """Rows of h."""
        return self.rows if self.batched else self.num_tokens * self.config.top_k

    @property
    def wide(self) -> torch.dtype:
        """Of h before it is quantised: 16 bits of float16 do not hold what an activation function may make."""
        return torch.bfloat16 if self.config.dtype is torch.bfloat16 else torch.float32


class ActivationScheme(ABC):
    """How x and h become operands.  It holds what does not depend on the call: functions, static scales, sizes."""

    #: whether rows of h are pairs also where gemm1 could leave them in sorted order
    h_by_pair: bool = False

    @abstractmethod
    def operands(self, shape: CallShape) -> tuple[WorkspaceSpec, ...]:
        """Scratch memory of x and h as they are multiplied."""

    @abstractmethod
    def quantize_x(self, call: Call) -> tuple[Schedule, OperandA]:
        """Sort the pairs (batched: list the tiles); x as operand A of gemm1."""

    @abstractmethod
    def result(self, call: Call) -> Result:
        """Where gemm1's epilogue leaves h, and how it is quantised there."""

    @abstractmethod
    def h(self, call: Call, order: Schedule, which: Rows) -> OperandA:
        """h as operand A of gemm2; its rows are ``which`` of the tile kernel's."""

    def weights_first(self, has_lora: bool) -> bool:
        """Whether router weights on the input multiply x itself, before it is quantised, and not gemm1's product.

        Adapters read x too.
        """
        return has_lora

    def workspaces(self, shape: CallShape, splits: bool) -> tuple[WorkspaceSpec, ...]:
        """All scratch memory of the layer; ``splits``: k loops may be split."""
        config, has_lora = shape.config, shape.config.is_lora_enabled
        on_input = config.apply_router_weight_on_input and not shape.batched
        weighted = on_input and self.weights_first(has_lora)
        return (
            *order_workspaces(shape.pairs, shape.num_tokens, config.local_experts, shape.batched),
            WorkspaceSpec(
                "x_weighted", (shape.rows if weighted else 0, config.hidden_size), torch.float32, BEFORE_GEMM2
            ),
            *self.operands(shape),
            split_k_workspace(config, shape.pairs if splits else 0),
            WorkspaceSpec("y", (0 if shape.batched else shape.pairs, config.hidden_size), config.dtype, FROM_GEMM2),
            *(lora_workspaces(config, shape.pairs) if has_lora else ()),
        )


def quantized(
    name: str, rows: int, columns: int, dtype: torch.dtype, scale_dtype: torch.dtype | None, *groups: int
) -> tuple[WorkspaceSpec, ...]:
    """Values [rows, columns] and their scales [rows], or [rows, groups] (None: values hold them), of ``name``.

    "x" and "sorted" are read before gemm2 alone.
    """
    phase = BEFORE_GEMM2 if name in ("x", "sorted") else None
    values = WorkspaceSpec(f"{name}_values", (rows, columns), dtype, phase)
    if scale_dtype is None:
        return (values,)
    return values, WorkspaceSpec(f"{name}_scales", (rows, *groups), scale_dtype, phase)


def padded(columns: int, block: int = TILE) -> int:
    """Columns with whole blocks."""
    return -(-columns // block) * block
