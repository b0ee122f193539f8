"""Selection as a value: candidates, every reason, the decision."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from moe_core.errors import ConfigError, MoEError
from moe_core.interface.experts import FusedMoEExperts
from moe_core.plugins.faults import PluginFault
from moe_core.spec.config import FusedMoEConfig
from moe_core.spec.device import DeviceInfo
from moe_core.spec.quant_key import QuantKey
from moe_core.spec.quant_key import key_name as name_of_key

if TYPE_CHECKING:
    from moe_core.kernels.tuning.choice import TuningChoice


@dataclass(frozen=True)
class Candidate:
    """One experts class that was considered; candidates are in order of preference.

    Attributes:
        backend: Name that ``moe_backend=`` takes.
        experts: The class.
        reasons: Reasons against it; empty if it fits.
        verified_on: Devices on which the conformance kit passed for these keys.
        takes_keys: Whether the class supports the keys of weights and activations, regardless of other reasons.
        fault: Set if its claims could not be read, which is then the reason.
        aliases: Further names that ``moe_backend=`` accepts for it.
    """

    backend: str
    experts: type[FusedMoEExperts]
    reasons: tuple[str, ...]
    verified_on: tuple[str, ...] = ()
    takes_keys: bool = True
    fault: PluginFault | None = None
    aliases: tuple[str, ...] = ()

    def answers_to(self, name: str) -> bool:
        """Whether ``moe_backend=name`` requests this candidate; "auto" requests all."""
        return name in ("auto", self.backend, *self.aliases)

    @property
    def fits(self) -> bool:
        """Whether there are no reasons against it."""
        return not self.reasons

    @property
    def path(self) -> str:
        """Location of the class, as "module:Class"."""
        return f"{self.experts.__module__}:{self.experts.__qualname__}"

    @property
    def notes(self) -> str:
        """The notes of its claims, for example on rounding."""
        return "" if self.fault is not None else self.experts.claims.notes

    def tested_on(self, device: DeviceInfo) -> str:
        """Describe where it was tested: "tested on cpu, NVIDIA H200 (sm90); not on sm100"."""
        if not self.verified_on:
            return "not tested on hardware"
        here = "" if self.is_tested_on(device) else f"; not on {device.arch}"
        return f"tested on {', '.join(self.verified_on)}{here}"

    def is_tested_on(self, device: DeviceInfo) -> bool:
        """Whether the conformance kit passed on a device of this architecture."""
        return any(name == device.arch or name.endswith(f"({device.arch})") for name in self.verified_on)

    @property
    def is_kernel(self) -> bool:
        """Whether it runs as GPU kernels alone, not as a loop on the host."""
        return self.experts.claims.cuda_graph


@dataclass(frozen=True)
class Alternative:
    """A changed request for which a GPU kernel runs the layer.

    Attributes:
        change: The change as text ("16-bit activations").
        backend: Backend that then fits.
        argument: Argument that makes the change (``activation_key=None``); empty if there is none.
        command: Option of ``moe``, or pip command; empty if there is none.
    """

    change: str
    backend: str
    argument: str = ""
    command: str = ""

    def __str__(self) -> str:
        how = ", ".join(text for text in (self.argument, self.command) if text)
        return f"with {self.change} {self.backend} fits" + (f" ({how})" if how else "")

    def as_dict(self) -> dict[str, str]:
        """Return a JSON-ready dict."""
        return {
            "change": self.change,
            "backend": self.backend,
            "argument": self.argument,
            "command": self.command,
        }


@dataclass(frozen=True)
class SelectionReport:
    """Everything that one selection considered.

    ``str()`` is for people, :meth:`as_dict` for programs.
    Attributes:
        scheme: Name of the scheme.
        device: Device of the selection.
        config: Config of the layer.
        weight_key: Quantization of weights; None for 16 bits.
        activation_key: Quantization of activations; None for 16 bits.
        requested: Requested backend, or "auto".
        candidates: All classes in order of preference.
        chosen: The selected candidate, if any.
        left_out: Plug-ins of this scheme that do not work.
        notes: Other remarks on plug-ins.
        alternatives: Changed requests that have a GPU kernel, if this one has none.
        tuning: What a profile of measured launch configurations has for the layer; None without a profile.
    """

    scheme: str
    device: DeviceInfo
    config: FusedMoEConfig
    weight_key: QuantKey | None
    activation_key: QuantKey | None
    requested: str
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    left_out: tuple[PluginFault, ...] = ()
    notes: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    tuning: TuningChoice | None = None

    @property
    def fallback(self) -> str | None:
        """Warning text if a host-driven loop would run on a GPU without being requested, else None."""
        if self.chosen is None or self.requested != "auto" or not self.device.is_gpu or self.chosen.is_kernel:
            return None
        slow = f"no GPU kernel fits on {self.device}: {self.chosen.backend} runs the layer as a loop driven by the host"
        if not self.alternatives:
            return f"{slow}; no other request has one that fits"
        return f"{slow}; {'; '.join(map(str, self.alternatives))}"

    @property
    def closest(self) -> tuple[Candidate, ...]:
        """Candidates with the fewest reasons against them, limited to the requested backend."""
        asked = [c for c in self.candidates if c.answers_to(self.requested)]
        best = one_of_each([c for c in asked if c.takes_keys] or asked)
        fewest = min((len(c.reasons) for c in best), default=0)
        return tuple(c for c in best if len(c.reasons) == fewest)

    def __str__(self) -> str:
        config = self.config
        how = "automatic" if self.requested == "auto" else f"asked for {self.requested}"
        sizes = f"E={config.num_experts} (local {config.local_experts}) k={config.top_k} K={config.hidden_size}"
        dtype = str(config.dtype).removeprefix("torch.")
        lines = [
            f"{self.scheme} on {self.device}: {self.chosen.backend if self.chosen else 'no backend'} ({how})",
            f"  layer: {sizes} N={config.intermediate_size} {config.activation.value} {dtype}",
            f"  weights: {self.weight_key or '16-bit'}",
            f"  activations: {self.activation_key or '16-bit'}",
        ]
        if self.fallback is not None:
            lines.append(f"  warning: {self.fallback}")
        elif self.chosen is None:
            lines += [f"  {alternative}" for alternative in self.alternatives]
        for backend, group in groupby(self.candidates, lambda candidate: candidate.backend):
            lines += self._lines(backend, tuple(group))
        lines += [f"  {fault}" for fault in self.left_out]
        lines += [f"  {note}" for note in self.notes]
        if self.tuning is not None:
            lines.append(f"  tuning: {self.tuning}")
        return "\n".join(lines)

    def _lines(self, backend: str, candidates: tuple[Candidate, ...]) -> Iterator[str]:
        """Yield a line per class; classes for other keys share a line if another class takes these."""
        shown = [c for c in candidates if c.takes_keys] or list(candidates)
        for candidate in shown:
            mark = "->" if candidate is self.chosen else "ok" if candidate.fits else "no"
            head = f"  {mark} {backend} [{candidate.experts.__name__}]"
            if candidate.fits:
                yield f"{head}: fits; {candidate.tested_on(self.device)}"
            else:
                yield f"{head}: {'; '.join(candidate.reasons)}"
        others = [c.experts.__name__ for c in candidates if c not in shown]
        if others:
            yield f"     {backend} for other quant keys: {', '.join(others)}"

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict with every reason of every candidate."""
        return {
            "scheme": self.scheme,
            "device": self.device.arch,
            "device_name": self.device.name,
            "requested": self.requested,
            "chosen": self.chosen.backend if self.chosen else None,
            "experts": self.chosen.path if self.chosen else None,
            "weight_key": key_name(self.weight_key),
            "activation_key": key_name(self.activation_key),
            "num_experts": self.config.num_experts,
            "local_experts": self.config.local_experts,
            "top_k": self.config.top_k,
            "hidden_size": self.config.hidden_size,
            "intermediate_size": self.config.intermediate_size,
            "activation": self.config.activation.value,
            "has_bias": self.config.has_bias,
            "activation_format": self.config.activation_format.value,
            "dtype": str(self.config.dtype).removeprefix("torch."),
            "candidates": [
                {
                    "backend": c.backend,
                    "experts": c.path,
                    "fits": c.fits,
                    "reasons": list(c.reasons),
                    "verified_on": list(c.verified_on),
                    "claims_notes": c.notes,
                }
                for c in self.candidates
            ],
            "fallback": self.fallback,
            "alternatives": [alternative.as_dict() for alternative in self.alternatives],
            "left_out": [fault.as_dict() for fault in self.left_out],
            "notes": list(self.notes),
            "tuning": None if self.tuning is None else self.tuning.as_dict(),
        }


def one_of_each(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the class with the fewest reasons against it for each backend.

    Args:
        candidates: Candidates, grouped by backend.

    Returns:
        One candidate per backend.
    """
    groups = groupby(candidates, lambda candidate: candidate.backend)
    return [min(group, key=lambda candidate: len(candidate.reasons)) for _, group in groups]


class SelectionError(MoEError, RuntimeError):
    """No backend was selected; ``report`` has every candidate with every reason.

    Args:
        message: Text of the error.
        report: Report of the selection.
    """

    def __init__(self, message: str, report: SelectionReport) -> None:
        super().__init__(message, details=str(report))
        self.report = report


class NoBackendError(SelectionError, NotImplementedError):
    """No installed backend fits the request."""


class BackendRefusedError(SelectionError, ValueError):
    """The requested backend does not fit, and is never replaced by another."""


class UnknownBackendError(SelectionError, ConfigError):
    """No installed backend has the requested name."""


@dataclass(frozen=True)
class Selection:
    """The decision: a backend, its experts class, and the report that explains it.

    It unpacks as ``backend, experts = selection``.

    Attributes:
        backend: Member of the scheme's enum, which is a string, or the name of another package's backend.
        experts: Experts class.
        report: Report of the selection.
    """

    backend: str
    experts: type[FusedMoEExperts]
    report: SelectionReport

    def __iter__(self) -> Iterator[Any]:
        return iter((self.backend, self.experts))

    @property
    def config(self) -> FusedMoEConfig:
        """Config of the layer."""
        return self.report.config

    @property
    def device(self) -> DeviceInfo:
        """Device of the selection."""
        return self.report.device

    @property
    def weight_key(self) -> QuantKey | None:
        """Quantization of weights; None for 16 bits."""
        return self.report.weight_key

    @property
    def activation_key(self) -> QuantKey | None:
        """Quantization of activations; None for 16 bits."""
        return self.report.activation_key


def key_name(key: QuantKey | None) -> str | None:
    """Return the name of a key that ``key_by_name`` accepts.

    Args:
        key: Key, or None for 16 bits.

    Returns:
        The name, the description of a key without a name, or None for 16 bits.
    """
    return None if key is None else name_of_key(key)
