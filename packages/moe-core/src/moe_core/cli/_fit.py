"""Memory fit of a model on a card, and the minimum time of its experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moe_core.cli import _report
from moe_core.cli._machine import Limits
from moe_core.cli._output import bytes_text, duration
from moe_core.parallel.distributed.uniform_routing import active_experts
from moe_core.spec.cards import card_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moe_core.checkpoint import Checkpoint
    from moe_core.selection.memory import LayerMemory
    from moe_core.selection.report import SelectionReport
    from moe_core.spec.device import DeviceInfo

#: token counts that floors are stated for: single-token decoding, a batch of it, a prompt
TOKENS = (1, 32, 4096)
#: operands of the product, by the element type that activations are quantized to
_OPERANDS = {"e4m3": "fp8", "e5m2": "fp8", "int8": "int8", "e2m1": "fp4"}


@dataclass(frozen=True)
class Fit:
    """Memory that a model needs on one device, in bytes.

    Attributes:
        memory: Memory of the device.
        experts: Experts of all MoE layers, in the backend's layout.
        layers: Number of MoE layers.
        largest: Experts of the largest layer.
        other: Everything else in the checkpoint, as stored; 0 for a layer without a checkpoint.
        workspace: Workspace, which the layers share.
        load_peak: Peak of all experts while the last layer is loaded.
    """

    memory: int
    experts: int
    layers: int
    largest: int
    other: int
    workspace: int
    load_peak: int

    @property
    def needed(self) -> int:
        """Peak memory without the KV cache."""
        return self.other + max(self.experts + self.workspace, self.load_peak)

    @property
    def fits(self) -> bool:
        return self.needed <= self.memory

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-ready form."""
        return {**vars(self), "needed": self.needed, "fits": self.fits}

    def __str__(self) -> str:
        """Return text such as "yes: 29.8 GiB of 80.0 GiB (experts 27.2 GiB …)"."""
        layers = f" in {self.layers} layers" if self.layers > 1 else ""
        parts = [f"experts {bytes_text(self.experts)}{layers}", f"workspace {bytes_text(self.workspace)}"]
        parts[1:1] = [f"everything else {bytes_text(self.other)}"] if self.other else []
        if self.load_peak > self.experts + self.workspace:
            parts[-1] = f"{bytes_text(self.load_peak - self.experts)} more at load"
        least = "" if self.fits else f"; {-(-self.needed // self.memory)} such GPUs at least"
        cache = "; the KV cache comes on top" if self.other else ""
        needs = f"needs {bytes_text(self.needed)} of {bytes_text(self.memory)} ({', '.join(parts)})"
        return f"{'yes' if self.fits else 'no'}: {needs}{least}{cache}"


def fit_of(
    device: DeviceInfo, memories: Sequence[LayerMemory], *, other: int = 0, count: int | None = None
) -> Fit | None:
    """Compare the memory that layers need with the memory of a card.

    Args:
        device: The card, or this machine's GPU.
        memories: Memory of each MoE layer, or of one of ``count`` equal layers.
        other: Bytes of everything else in the checkpoint.
        count: Number of MoE layers; None for the number of ``memories``.

    Returns:
        The comparison; None if the memory is unknown (a CPU, or an architecture instead of a card).
    """
    if not device.is_gpu or not device.memory or device.name == device.arch or not memories:
        return None
    if count is not None:
        memories = [memories[0]] * count
    experts = sum(memory.weights for memory in memories)
    return Fit(
        memory=device.memory,
        experts=experts,
        layers=len(memories),
        largest=max(memory.weights for memory in memories),
        other=other,
        workspace=max(memory.workspace or 0 for memory in memories),
        load_peak=max(experts - memory.weights + memory.load_peak for memory in memories),
    )


def other_bytes(checkpoint: Checkpoint, expert_bytes: int) -> int:
    """Return the bytes of a checkpoint other than its experts.

    Args:
        checkpoint: The checkpoint.
        expert_bytes: Bytes of the experts of all MoE layers, as stored.

    Returns:
        The remainder of all files; 0 if unequal layers make the estimate exceed it.
    """
    return max(checkpoint.nbytes - expert_bytes, 0)


@dataclass(frozen=True)
class Floor:
    """Minimum time of one call on one GPU.

    Attributes:
        tokens: Tokens of the call.
        seconds: The larger of bytes over bandwidth and operations over rate.
        bound: The larger one: "memory" or "products".
    """

    tokens: int
    seconds: float
    bound: str


@dataclass(frozen=True)
class Floors:
    """Floors of one layer, and the limits of the card that they follow from."""

    limits: Limits
    calls: tuple[Floor, ...]


def floors_of(report: SelectionReport, memory: LayerMemory) -> Floors | None:
    """Return the floors of a layer's experts from a card's figures, as in ``moe bench``.

    Args:
        report: Selection, which names the device.
        memory: Memory of the experts.

    Returns:
        The floors; None if the card's figures are unknown.
    """
    card, config = card_of(report.device.name), report.config
    if card is None or config.dtype.itemsize != 2:
        return None
    operand = "bf16" if report.activation_key is None else _OPERANDS.get(report.activation_key.dtype.name, "bf16")
    found = card.rate(operand)
    bandwidth = report.device.bandwidth or card.bandwidth
    if found is None or not bandwidth:
        return None
    limits = Limits(bandwidth * 1e9, found[1], found[0])
    calls = []
    for tokens in TOKENS:
        active = active_experts(config.num_experts, config.local_experts, config.top_k, tokens)
        calls.append(Floor(tokens, *limits.floor(config, memory.weights, active, tokens)))
    return Floors(limits, tuple(calls))


def refusal(fit: Fit, device: str) -> str:
    """Return the message for stderr about a model that does not fit."""
    return f"moe explain: does not fit on {device}: {bytes_text(fit.needed)} of {bytes_text(fit.memory)}"


def fit_lines(fit: Fit | None) -> list[str]:
    """Return the line with the verdict."""
    return [] if fit is None else _report.labeled("fits", [str(fit)])


def total_floor(layers: Sequence[Floors]) -> dict[str, Any] | None:
    """Return JSON-ready floors of calls that run all ``layers``; None if there are none."""
    if not layers:
        return None
    calls = [
        {
            "tokens": tokens,
            "seconds": sum(floors.calls[number].seconds for floors in layers),
            "bound": sorted({floors.calls[number].bound for floors in layers}),
        }
        for number, tokens in enumerate(TOKENS)
    ]
    limits = layers[0].limits
    return {"bandwidth": limits.bandwidth, "rate": limits.rate, "product": limits.product, "calls": calls}


def floor_lines(layers: Sequence[Floors]) -> list[str]:
    """Return the line with the minimum time of a call.

    Args:
        layers: Floors of each layer that a call runs.
    """
    found = total_floor(layers)
    if found is None:
        return []
    shown = [
        f"{duration(call['seconds'])} for {call['tokens']} token{'s' * (call['tokens'] > 1)} "
        f"({' and '.join(call['bound'])})"
        for call in found["calls"]
    ]
    figures = f"{found['bandwidth'] / 1e9:.0f} GB/s, {found['rate'] / 1e12:.0f} TFLOP/s in {found['product']}"
    what = "the layer" if len(layers) == 1 else f"{len(layers)} layers"
    return _report.labeled("floor", [f"experts of {what}: {', '.join(shown)}; one GPU of {figures}"])
