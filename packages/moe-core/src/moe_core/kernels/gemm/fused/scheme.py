"""Activation schemes: how hidden states x and the intermediate h become GEMM operands."""

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

#: Columns of a gemm1 tile, and the multiple that rows of x and h are padded to.
TILE = 128


@dataclass(frozen=True)
class CallShape:
    """Size of a layer's largest call.

    Attributes:
        config: Configuration of the layer.
        num_tokens: Tokens M; batched: rows T_max of each expert's buffer.
    """

    config: FusedMoEConfig
    num_tokens: int

    @property
    def batched(self) -> bool:
        """Whether activations are in the batched format."""
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
        """Dtype of h before quantization: float16 cannot hold every activation function's output."""
        return torch.bfloat16 if self.config.dtype is torch.bfloat16 else torch.float32


class ActivationScheme(ABC):
    """How x and h become operands.

    A scheme holds only what does not depend on the call: functions, static scales and sizes.

    Attributes:
        h_by_pair: Whether rows of h are pairs even where gemm1 could leave them in sorted order.
    """

    #: Whether rows of h are pairs even where gemm1 could leave them in sorted order.
    h_by_pair: bool = False

    @abstractmethod
    def operands(self, shape: CallShape) -> tuple[WorkspaceSpec, ...]:
        """Return the workspaces of x and h as operands.

        Args:
            shape: Size of the largest call.

        Returns:
            Specifications of the workspace tensors.
        """

    @abstractmethod
    def quantize_x(self, call: Call) -> tuple[Schedule, OperandA]:
        """Sort the pairs (batched: list the tiles) and prepare x.

        Args:
            call: The call.

        Returns:
            The schedule, and x as operand A of gemm1.
        """

    @abstractmethod
    def result(self, call: Call) -> Result:
        """Return where gemm1's epilogue stores h, and how it quantizes h.

        Args:
            call: The call.

        Returns:
            The destination.
        """

    @abstractmethod
    def h(self, call: Call, order: Schedule, which: Rows) -> OperandA:
        """Return h as operand A of gemm2.

        Args:
            call: The call.
            order: The schedule.
            which: Meaning of a tile row in h.

        Returns:
            The operand.
        """

    def weights_first(self, has_lora: bool) -> bool:
        """Whether router weights on the input multiply x itself before quantization.

        Otherwise they multiply gemm1's output. Adapters read x too.

        Args:
            has_lora: Whether the call has adapters.

        Returns:
            True if x is weighted first.
        """
        return has_lora

    def workspaces(self, shape: CallShape, splits: bool) -> tuple[WorkspaceSpec, ...]:
        """Return all workspaces of the layer.

        Args:
            shape: Size of the largest call.
            splits: Whether mainloops may be split.

        Returns:
            Specifications of the workspace tensors.
        """
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
    """Return the workspaces of quantized rows.

    Args:
        name: "x", "h" or "sorted". "x" and "sorted" are read before gemm2 only.
        rows: Number of rows.
        columns: Columns of the values.
        dtype: Dtype of the values.
        scale_dtype: Dtype of the scales; None if the values include them.
        groups: Scales per row; without it, scales are [rows].

    Returns:
        Specifications of the values [rows, columns], and of the scales [rows] or [rows, groups] if there are any.
    """
    phase = BEFORE_GEMM2 if name in ("x", "sorted") else None
    values = WorkspaceSpec(f"{name}_values", (rows, columns), dtype, phase)
    if scale_dtype is None:
        return (values,)
    return values, WorkspaceSpec(f"{name}_scales", (rows, *groups), scale_dtype, phase)


def padded(columns: int, block: int = TILE) -> int:
    """Round the number of columns up to whole blocks.

    Args:
        columns: Number of columns.
        block: Columns of a block.

    Returns:
        The smallest sufficient multiple of ``block``.
    """
    return -(-columns // block) * block
