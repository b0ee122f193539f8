"""Input of the launch heuristics: layer properties that do not change between calls."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from moe_core.spec.device import DeviceInfo
from moe_core.spec.numerics import NumberKind
from moe_core.spec.quant_key import QuantKey

#: Kernel families; "as_stored" decodes weights as checkpoints store them.
Family = Literal["scaled_mm", "mixed_input", "as_stored"]
#: `balance_of` an H200, the default for unknown devices.
BALANCE = 117


def balance_of(device: DeviceInfo) -> int:
    """Return the rows per expert at which an 8-bit GEMM takes as long as reading their weights.

    It is 172 on an H100. Each row takes two operations per byte, at 1150 TFLOP/s for 132 SMs of sm_90.

    Args:
        device: The GPU.

    Returns:
        The balance point, or `BALANCE` for other architectures and unknown bandwidths.
    """
    if device.capability != 90 or not device.bandwidth:
        return BALANCE
    return round(1150e12 * device.multiprocessors / 132 / (2e9 * device.bandwidth))


@dataclass(frozen=True)
class LayerProblem:
    """Layer properties that determine its launch configurations.

    Instances are hashable, so that plans can be looked up by them.

    Attributes:
        family: Kernel family.
        element: Element type of the weights, by which its launch rules are found. Its digits state the bits: "int4" has
            4, "e4m3" has 1 + 4 + 3.
        num_experts: Number of experts of the layer, local or not.
        top_k: Number of experts per token.
        hidden_size: Hidden size.
        intermediate_size: Intermediate size.
        gated: Whether gemm1 has gate and up halves.
        dtype_bytes: Bytes per element of the operands that activations become: 1, 2 or 4.
        group_size: Number of columns whose partial sum is scaled separately; -1 scales only the finished sum.
        permuted: Whether each column has its own scale (activation order), or rows of h are ordered by pair.
        quantizes_h: Whether the gemm1 epilogue quantizes h.
        lora: Whether LoRA deltas are added, which only the tile kernel supports.
        capability: Compute capability, 90 for sm_90; 0 without an NVIDIA GPU.
        may_split: Whether a workspace for the partial sums of split-K exists.
        batch_invariant: Whether a row's result must have the same bits for every number of tokens.
        balance: Balance point of the GPU, see `balance_of`.
        sharded: Whether some experts are on other ranks.
    """

    family: Family
    element: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    gated: bool = True
    dtype_bytes: int = 2
    group_size: int = -1
    permuted: bool = False
    quantizes_h: bool = False
    lora: bool = False
    capability: int = 90
    may_split: bool = True
    batch_invariant: bool = False
    balance: int = BALANCE
    sharded: bool = False

    @property
    def bits(self) -> int:
        """Bits per weight code."""
        digits = [int(number) for number in re.findall(r"\d+", self.element)]
        return digits[0] if len(digits) == 1 else 1 + sum(digits)

    @property
    def width(self) -> int:
        """Rows of gemm1's weights per expert, of both halves if gated."""
        return self.intermediate_size * (2 if self.gated else 1)

    @property
    def expert_bytes(self) -> float:
        """Bytes of an expert's weights, without scales."""
        return self.hidden_size * (self.width + self.intermediate_size) * self.bits / 8

    def rows_per_expert(self, tokens: int) -> float:
        """Return the mean number of rows per expert.

        Args:
            tokens: Number of tokens of the call.

        Returns:
            The mean over all experts.
        """
        return tokens * self.top_k / self.num_experts

    def reached(self, tokens: int) -> float:
        """Return the expected number of experts that receive any token, under uniform routing.

        Args:
            tokens: Number of tokens of the call.

        Returns:
            The expected number of experts.
        """
        return self.num_experts * (1 - max(0.0, 1 - self.top_k / self.num_experts) ** tokens)


def element_of(key: QuantKey | None) -> str:
    """Return the element type of a weight key.

    Symmetric and unsigned integers count as one type.

    Args:
        key: Quantization key of the weights, or None.

    Returns:
        The element type; "int4" for None.
    """
    if key is None or key.dtype.kind is not NumberKind.FLOAT:
        return "int8" if key is not None and key.dtype.bits == 8 else "int4"
    return "e4m3" if key.dtype.bits == 8 else "e2m1"
