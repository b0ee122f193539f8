"""What connects the GPUs of a machine, and what each can do, as data for :mod:`moe_core.parallel.distributed.cost`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

from moe_core._support.atomic_write import as_path
from moe_core.errors import ConfigError, did_you_mean
from moe_core.spec.cards import CARDS
from moe_core.spec.config import whole_number

#: what a step between ranks is made of: collectives of NCCL, and kernels that write into the memory of other GPUs
ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, ALL_TO_ALL, PUSH = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "push",
)
KINDS = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, ALL_TO_ALL, PUSH)


@dataclass(frozen=True)
class Link:
    """One GPU's link to others: ``bandwidth`` in bytes/s of each direction, ``latency`` in seconds of one hop."""

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Kind:
    """What a kind of step adds to its links: ``call``, seconds before anything moves, and the part of the links'
    bandwidth that it attains: ``efficiency`` (0 to 1) within a domain, ``far_efficiency`` between domains (None: the
    same)."""

    call: float
    efficiency: float
    far_efficiency: float | None = None

    @property
    def far(self) -> float:
        """The part of the network's bandwidth."""
        return self.efficiency if self.far_efficiency is None else self.far_efficiency


@dataclass(frozen=True)
class Sample:
    """Measured steps that were timed together: their kinds, how many ``calls`` they are, seconds of latency (and
    whatever else is known), of transfer by the links alone, and seconds as measured; ``far``: whether some of it went
    between domains."""

    kinds: tuple[str, ...]
    latency: float
    transfer: float
    seconds: float
    calls: int = 1
    far: bool = False


#: of kinds that were not measured: what NCCL takes for a small message, and the part of NVLink that its rings attain
_ASSUMED = {
    ALL_GATHER: Kind(8e-6, 0.8),
    REDUCE_SCATTER: Kind(8e-6, 0.8),
    ALL_REDUCE: Kind(8e-6, 0.8),
    ALL_TO_ALL: Kind(12e-6, 0.75),
    PUSH: Kind(3e-6, 0.75),
}


@dataclass(frozen=True)
class Machine:
    """A cluster of equal GPUs.

    - ``domain``: GPUs that reach each other's memory (NVLink): those of a host, or of a rack
    - ``near``, ``far``: one GPU's link within a domain, and its share of the network between domains
    - ``memory_bandwidth`` in bytes/s; ``rates``: operations/s (a multiply-add is two) of dense matrix products, by the
      bits of their operands
    - ``kinds``: what each kind of step adds
    - ``cache``: bytes of a GPU's last cache: what kernels around a step move beyond it goes through memory, of whose
      bandwidth they attain ``memory_efficiency``; None: that is left out
    - ``sync``: seconds that the host loses where it must wait for a number from the GPU
    - ``source``: where the figures are from

    Raises ConfigError for figures that can't be.
    """

    name: str
    domain: int
    near: Link
    far: Link
    memory_bandwidth: float
    rates: Mapping[int, float]
    kinds: Mapping[str, Kind] = field(default_factory=lambda: _ASSUMED)
    sync: float = 20e-6
    cache: float | None = None
    memory_efficiency: float = 0.75
    source: str = "data sheets; latencies and attained bandwidths are assumed"

    def __post_init__(self) -> None:
        whole_number(f"machine {self.name}: domain", self.domain)
        unknown = sorted(set(self.kinds) - set(KINDS))
        if unknown:
            raise ConfigError(f"machine {self.name}: {unknown[0]!r} is no kind of step; known: {', '.join(KINDS)}")
        object.__setattr__(self, "kinds", {**_ASSUMED, **self.kinds})
        object.__setattr__(self, "rates", dict(self.rates))
        if 16 not in self.rates:
            raise ConfigError(f"machine {self.name}: rates is {dict(self.rates)}, expected that of 16 bits at least")
        positive = {
            "near.bandwidth": self.near.bandwidth,
            "far.bandwidth": self.far.bandwidth,
            "memory_bandwidth": self.memory_bandwidth,
            "memory_efficiency": self.memory_efficiency,
            **{f"rates[{bits}]": rate for bits, rate in self.rates.items()},
            **{f"kinds[{name!r}].efficiency": kind.efficiency for name, kind in self.kinds.items()},
            **{f"kinds[{name!r}].far_efficiency": kind.far for name, kind in self.kinds.items()},
        }
        others = {
            "near.latency": self.near.latency,
            "far.latency": self.far.latency,
            "sync": self.sync,
            "cache": self.cache or 0.0,
            **{f"kinds[{name!r}].call": kind.call for name, kind in self.kinds.items()},
        }
        for name, value in {**positive, **others}.items():
            if not 0 <= value < math.inf or (name in positive and value == 0):
                least = "a positive number" if name in positive else "0 or more"
                raise ConfigError(f"machine {self.name}: {name} is {value!r}, expected {least}")

    def rate(self, bits: int) -> float:
        """Operations/s of products of operands with ``bits`` bits; that of wider ones where it has none so narrow."""
        return self.rates[min((known for known in self.rates if known >= bits), default=16)]

    def fitted(self, samples: Iterable[Sample], source: str) -> Machine:
        """The machine with ``call`` and ``efficiency`` of each kind from measured steps, two of a kind at least.

        ``seconds = calls * call + latency + transfer / efficiency``, with the least sum of squared relative errors.
        Kinds that were timed together get the same.  Kinds with fewer samples, or all of one size, stay as they are,
        and so does what kinds attain between domains where no sample went there.
        """
        together: dict[tuple[str, ...], list[Sample]] = {}
        for sample in samples:
            together.setdefault(tuple(sorted(set(sample.kinds))), []).append(sample)
        kinds = dict(self.kinds)
        for names, mine in together.items():
            found = _least_squares(mine)
            if found is not None:
                far = any(sample.far for sample in mine)
                kinds |= {name: found if far else replace(found, far_efficiency=kinds[name].far) for name in names}
        return replace(self, kinds=kinds, source=source)

    def to_json(self) -> dict[str, Any]:
        """As :meth:`from_json` reads it."""
        return {
            **{f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("near", "far", "rates", "kinds")},
            "near": asdict(self.near),
            "far": asdict(self.far),
            "rates": {str(bits): rate for bits, rate in self.rates.items()},
            "kinds": {name: asdict(kind) for name, kind in self.kinds.items()},
        }

    @staticmethod
    def from_json(value: object) -> Machine:
        """The machine that :meth:`to_json` wrote.  Raises ConfigError for anything else."""
        try:
            if not isinstance(value, dict):
                raise TypeError(f"it is a {type(value).__name__}, expected an object")
            given: dict[str, Any] = dict(value)
            given["near"], given["far"] = Link(**given["near"]), Link(**given["far"])
            given["rates"] = {int(bits): rate for bits, rate in given["rates"].items()}
            if "kinds" in given:
                given["kinds"] = {name: Kind(**kind) for name, kind in given["kinds"].items()}
            return Machine(**given)
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            if isinstance(error, ConfigError):
                raise
            names = ", ".join(f.name for f in fields(Machine))
            raise ConfigError(f"this is no machine ({error}), expected {names}") from None

    @staticmethod
    def load(name: str) -> Machine:
        """A machine by name ("h200"), or from a JSON file.  Raises ConfigError."""
        from moe_core._support.strict_json import load_settings

        path = as_path("name", name)
        if str(name) in MACHINES:
            return MACHINES[str(name)]
        if path.suffix != ".json":
            meant = did_you_mean(name, MACHINES)
            raise ConfigError(f"machine {name!r} is unknown{meant}; expected {', '.join(MACHINES)} or a JSON file")
        content = load_settings("name", path)
        try:
            return Machine.from_json(content)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error.message}") from None

    @staticmethod
    def of_device(name: str) -> Machine | None:
        """What is known of machines with that GPU, by its name ("NVIDIA H200", "h200"); None for others."""
        words = name.lower().replace("-", " ").split()
        return next((MACHINES[word] for word in words if word in MACHINES), None)


def _least_squares(samples: list[Sample]) -> Kind | None:
    """The kind that explains the samples best; None where they do not say one."""
    # relative errors: each sample is divided by its seconds
    rows = [(s.calls / s.seconds, s.transfer / s.seconds, (s.seconds - s.latency) / s.seconds) for s in samples]
    calls = sum(a * a for a, _, _ in rows)
    both = sum(a * b for a, b, _ in rows)
    bytes_ = sum(b * b for _, b, _ in rows)
    of_calls, of_bytes = sum(a * y for a, _, y in rows), sum(b * y for _, b, y in rows)
    determinant = calls * bytes_ - both * both
    if determinant <= 1e-12 * calls * bytes_:
        return None
    call = (of_calls * bytes_ - of_bytes * both) / determinant
    if call < 0:
        call, slope = 0.0, of_bytes / bytes_
    else:
        slope = (of_bytes * calls - of_calls * both) / determinant
    return None if slope <= 0 else Kind(call, 1 / slope)


def _nvlink(
    name: str,
    domain: int,
    near: float,
    far: float,
    memory: float,
    cache: float,
    measured: Mapping[str, Kind] | None = None,
    where: str = "",
) -> Machine:
    """Units of data sheets: GB/s of each direction, TB/s of memory, MB of cache; rates are those of the card.

    ``measured`` kinds of steps, and ``where``.
    """
    machine = Machine(
        name,
        domain,
        near=Link(near * 1e9, 1e-6),
        far=Link(far * 1e9, 4e-6),
        memory_bandwidth=memory * 1e12,
        rates=CARDS[name].rates_by_bits,
        cache=cache * 1e6,
    )
    return machine if measured is None else replace(machine, kinds=measured, source=_SOURCE.format(where))


#: what layers of this package attained: benchmarks/distributed_model.py, of docs/results/several-gpus-h100.json, and of
#: docs/results/several-gpus.json, which is from before results went to all ranks at the same time: an H200 attains as
#: much of the links as an H100 there
_H100 = {
    ALL_GATHER: Kind(15.7e-6, 0.54, 0.8),
    REDUCE_SCATTER: Kind(15.7e-6, 0.54, 0.8),
    PUSH: Kind(14.0e-6, 0.85, 0.75),
}
_H200 = {
    ALL_GATHER: Kind(14.5e-6, 0.43, 0.8),
    REDUCE_SCATTER: Kind(14.5e-6, 0.43, 0.8),
    PUSH: Kind(8.5e-6, 0.85, 0.75),
}
_SOURCE = "data sheets; all-gather, reduce-scatter and push measured on {}, all else assumed"

#: Hosts of eight GPUs with one network adapter each (200 Gbit/s for A100, else 400), a rack of 72.
MACHINES: Mapping[str, Machine] = MappingProxyType(
    {
        machine.name: machine
        for machine in (
            _nvlink("a100", 8, 300, 25, 2.04, 40),
            _nvlink("h100", 8, 450, 50, 3.35, 50, _H100, "two and four GPUs of a host"),
            _nvlink("h200", 8, 450, 50, 4.8, 50, _H200, "two GPUs of a host (what push attains: H100)"),
            _nvlink("b200", 8, 900, 50, 7.7, 126),
            _nvlink("gb200", 72, 900, 50, 8.0, 126),
        )
    }
)
