"""Selection as a value: candidates, every reason, the decision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from moe_core.config import FusedMoEConfig
from moe_core.device import DeviceInfo
from moe_core.errors import MoEError
from moe_core.experts import FusedMoEExperts
from moe_core.quant_key import NAMES, QuantKey


@dataclass(frozen=True)
class Candidate:
    """One experts class that was considered, in order of preference.

    ``reasons`` against it; empty: it fits.  ``backend`` is the name that ``moe_backend=`` takes.  ``takes_keys``: the
    weights and activations are of the kinds that it was made for, whatever else stands against it.
    """

    backend: str
    experts: type[FusedMoEExperts]
    reasons: tuple[str, ...]
    verified_on: tuple[str, ...] = ()
    takes_keys: bool = True

    @property
    def fits(self) -> bool:
        return not self.reasons


@dataclass(frozen=True)
class SelectionReport:
    """Everything that one selection looked at; ``str()`` is for people, :meth:`as_dict` for programs."""

    scheme: str
    device: DeviceInfo
    config: FusedMoEConfig
    weight_key: QuantKey | None
    activation_key: QuantKey | None
    requested: str
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None

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
        for backend, group in groupby(self.candidates, lambda candidate: candidate.backend):
            lines += self._lines(backend, tuple(group))
        return "\n".join(lines)

    def _lines(self, backend: str, candidates: tuple[Candidate, ...]) -> Iterator[str]:
        """A line per class; classes made for other keys share one where a class beside them takes these."""
        shown = [c for c in candidates if c.takes_keys] or list(candidates)
        for candidate in shown:
            mark = "->" if candidate is self.chosen else "ok" if candidate.fits else "no"
            head = f"  {mark} {backend} [{candidate.experts.__name__}]"
            if candidate.fits:
                seen = f"run on {', '.join(candidate.verified_on)}" if candidate.verified_on else "not run on hardware"
                yield f"{head}: fits; {seen}"
            else:
                yield f"{head}: {'; '.join(candidate.reasons)}"
        others = [c.experts.__name__ for c in candidates if c not in shown]
        if others:
            yield f"     {backend} for other quant keys: {', '.join(others)}"

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form, every reason of every candidate."""
        return {
            "scheme": self.scheme,
            "device": self.device.arch,
            "device_name": self.device.name,
            "requested": self.requested,
            "chosen": self.chosen.backend if self.chosen else None,
            "weight_key": key_name(self.weight_key),
            "activation_key": key_name(self.activation_key),
            "num_experts": self.config.num_experts,
            "top_k": self.config.top_k,
            "hidden_size": self.config.hidden_size,
            "intermediate_size": self.config.intermediate_size,
            "activation": self.config.activation.value,
            "dtype": str(self.config.dtype).removeprefix("torch."),
            "candidates": [
                {
                    "backend": c.backend,
                    "experts": f"{c.experts.__module__}:{c.experts.__qualname__}",
                    "fits": c.fits,
                    "reasons": list(c.reasons),
                    "verified_on": list(c.verified_on),
                }
                for c in self.candidates
            ],
        }


class SelectionError(MoEError, RuntimeError):
    """No backend fits; ``report`` holds every candidate with every reason."""

    def __init__(self, message: str, report: SelectionReport) -> None:
        super().__init__(message)
        self.report = report


@dataclass(frozen=True)
class Selection:
    """The decision: a backend, its experts class, and the report that explains it."""

    backend: str
    experts: type[FusedMoEExperts]
    report: SelectionReport

    @property
    def config(self) -> FusedMoEConfig:
        return self.report.config

    @property
    def device(self) -> DeviceInfo:
        return self.report.device

    @property
    def weight_key(self) -> QuantKey | None:
        return self.report.weight_key

    @property
    def activation_key(self) -> QuantKey | None:
        return self.report.activation_key


def key_name(key: QuantKey | None) -> str | None:
    """The constant's name, the description where it has none, None for 16-bit."""
    return None if key is None else NAMES.get(key, str(key))
