"""Memory fit of a model on a card, and the minimum time of its experts."""

from __future__ import annotations

import functools
import operator
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
    from moe_core.spec.config import FusedMoEParallelConfig
    from moe_core.spec.device import DeviceInfo

#: token counts that floors are stated for: single-token decoding, a batch of it, a prompt
TOKENS = (1, 32, 4096)
#: GEMM operands, keyed by the element type of quantized activations
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


@dataclass(frozen=True)
class Floors:
    """Minimum times of calls that run some layers on one GPU.

    Attributes:
        limits: Limits of the card that they follow from.
        calls: Tokens, seconds and bounds ("memory", "products") of each call.
        layers: Number of layers.
    """

    limits: Limits
    calls: tuple[tuple[int, float, frozenset[str]], ...]
    layers: int = 1

    def __add__(self, other: Floors) -> Floors:
        """Floors of calls that run the layers of both."""
        pairs = zip(self.calls, other.calls, strict=True)
        calls = tuple((tokens, one + two, bound | more) for (tokens, one, bound), (_, two, more) in pairs)
        return Floors(self.limits, calls, self.layers + other.layers)

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-ready form."""
        calls = [{"tokens": tokens, "seconds": time, "bound": sorted(bound)} for tokens, time, bound in self.calls]
        return {**vars(self.limits), "calls": calls}

    def __str__(self) -> str:
        """Return text such as "experts of the layer: 3.8 µs for 1 token (memory) …"."""
        shown = [
            f"{duration(seconds)} for {tokens} token{'s' * (tokens > 1)} ({' and '.join(sorted(bound))})"
            for tokens, seconds, bound in self.calls
        ]
        limits = self.limits
        figures = f"{limits.bandwidth / 1e9:.0f} GB/s, {limits.rate / 1e12:.0f} TFLOP/s in {limits.product}"
        what = "the layer" if self.layers == 1 else f"{self.layers} layers"
        return f"experts of {what}: {', '.join(shown)}; one GPU of {figures}"


@dataclass(frozen=True)
class Figures:
    """Memory fit and floors of the layers of a model; None where the card's figures are unknown."""

    fit: Fit | None = None
    floors: Floors | None = None

    @staticmethod
    def of(
        layers: Sequence[tuple[SelectionReport, LayerMemory]],
        checkpoint: Checkpoint | None,
        stored: int,
        parallel: FusedMoEParallelConfig | None,
    ) -> Figures:
        """Compare what layers need with a card.

        Args:
            layers: Selection and memory of each MoE layer.
            checkpoint: The checkpoint; None for a layer without one.
            stored: Bytes of the experts of these layers in the checkpoint.
            parallel: Ranks of the layer; None for a single one, which alone has floors.
        """
        if not layers:
            return Figures()
        # The remainder of all files; unequal layers may make the estimate exceed it.
        other = 0 if checkpoint is None else max(checkpoint.nbytes - stored, 0)
        fit = _fit(
            layers[0][0].device, [memory for _, memory in layers], other // (parallel.tp_size if parallel else 1)
        )
        if parallel is not None:
            return Figures(fit)
        floors = [found for found in (_floors(*one) for one in layers) if found is not None]
        return Figures(fit, functools.reduce(operator.add, floors) if floors else None)

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-ready form."""
        return {
            "fit": None if self.fit is None else self.fit.as_dict(),
            "floor": None if self.floors is None else self.floors.as_dict(),
        }

    def lines(self) -> list[str]:
        """Return lines with the verdict and the minimum time of a call."""
        return [
            *_report.labeled("fits", [] if self.fit is None else [str(self.fit)]),
            *_report.labeled("floor", [] if self.floors is None else [str(self.floors)]),
        ]


def _fit(device: DeviceInfo, memories: Sequence[LayerMemory], other: int) -> Fit | None:
    """Compare the memory of layers with that of a card; None for a CPU, or an architecture instead of a card."""
    if not device.is_gpu or not device.memory or device.name == device.arch:
        return None
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


def _floors(report: SelectionReport, memory: LayerMemory) -> Floors | None:
    """Return the floors of a layer's experts from a card's figures, as in ``moe bench``."""
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
        seconds, bound = limits.floor(config, memory.weights, active, tokens)
        calls.append((tokens, seconds, frozenset({bound})))
    return Floors(limits, tuple(calls))


def refusal(fit: Fit, device: str) -> str:
    """Return the message for stderr about a model that does not fit."""
    return f"moe explain: does not fit on {device}: {bytes_text(fit.needed)} of {bytes_text(fit.memory)}"
