"""What launch heuristics are asked: everything about a layer that does not change from call to call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moe_core.spec.device import DeviceInfo
from moe_core.spec.numerics import NumberKind
from moe_core.spec.quant_key import QuantKey

#: kernel families; "as_stored" decodes weights as checkpoints store them
Family = Literal["scaled_mm", "mixed_input", "as_stored"]
#: weights
Element = Literal["int4", "int8", "e2m1", "e4m3"]


#: `balance_of` an H200, where nothing is known
BALANCE = 117


def balance_of(device: DeviceInfo) -> int:
    """Rows per expert with which 8-bit products take as long as reading their weights: 172 on an H100.

    Each row has two operations for each byte, at 1150 TFLOP/s of 132 multiprocessors of sm_90.
    """
    if device.capability != 90 or not device.bandwidth:
        return BALANCE
    return round(1150e12 * device.multiprocessors / 132 / (2e9 * device.bandwidth))


@dataclass(frozen=True)
class LayerProblem:
    """A layer, as far as its launch configurations depend on it; hashable, so that plans can be looked up by it.

    ``num_experts`` of the layer, local or not; ``gated``: gemm1 has gate and up; ``dtype_bytes`` of the operands that
    activations become, 1, 2 or 4; ``capability`` 90 for sm_90, 0 for no NVIDIA GPU; ``may_split``: partial sums of
    split-K have a place; ``batch_invariant``: a row's result is the same bits for every number of tokens; ``balance``
    of the GPU, see `balance_of`; ``sharded``: some of the experts are on other ranks.

    - ``group_size`` columns whose partial sum is scaled by itself, -1: only the finished sum
    - ``permuted``: each column has a scale of its own (activation order), or rows of h are by pair
    - ``quantizes_h``: the epilogue of gemm1 quantises h
    - ``lora``: LoRA deltas are added, by the tile kernel alone
    """

    family: Family
    element: Element
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
        """Of a weight's code."""
        return 4 if self.element in ("int4", "e2m1") else 8

    def rows_per_expert(self, tokens: int) -> float:
        """The mean over all experts."""
        return tokens * self.top_k / self.num_experts

    def reached(self, tokens: int) -> float:
        """Experts that any of the tokens goes to, in the mean over uniform routing."""
        return self.num_experts * (1 - max(0.0, 1 - self.top_k / self.num_experts) ** tokens)


def element_of(key: QuantKey | None) -> Element:
    """The element type of a weight key; symmetric and unsigned integers are one."""
    if key is None or key.dtype.kind is not NumberKind.FLOAT:
        return "int8" if key is not None and key.dtype.bits == 8 else "int4"
    return "e4m3" if key.dtype.bits == 8 else "e2m1"
