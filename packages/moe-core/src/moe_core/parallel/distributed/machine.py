"""Machine descriptions (links, GPU rates) for :mod:`moe_core.parallel.distributed.cost`."""

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

#: Kinds of communication steps: NCCL collectives, and kernels that write into the memory of other GPUs.
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
    """One GPU's link to others.

    Attributes:
        bandwidth: Bytes/s in each direction.
        latency: Seconds of one hop.
    """

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Kind:
    """The overhead and attained bandwidth of one kind of communication step.

    Attributes:
        call: Seconds before anything moves.
        efficiency: Attained fraction (0 to 1) of the link bandwidth within a domain.
        far_efficiency: Attained fraction of the bandwidth between domains; None for the same.
    """

    call: float
    efficiency: float
    far_efficiency: float | None = None

    @property
    def far(self) -> float:
        """Attained fraction of the network bandwidth."""
        return self.efficiency if self.far_efficiency is None else self.far_efficiency


@dataclass(frozen=True)
class Sample:
    """Measured steps that were timed together.

    Attributes:
        kinds: Kinds of the steps.
        latency: Seconds of latency, and of other known terms.
        transfer: Seconds of the transfers at full link bandwidth.
        seconds: Measured seconds.
        calls: Number of calls.
        far: Whether any data went between domains.
    """

    kinds: tuple[str, ...]
    latency: float
    transfer: float
    seconds: float
    calls: int = 1
    far: bool = False


#: Defaults for kinds that were not measured: NCCL's time for a small message, and the fraction of NVLink that its rings
#: attain.
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

    Attributes:
        name: Name of the machine.
        domain: Number of GPUs that reach each other's memory (NVLink): those of a host, or of a rack.
        near: One GPU's link within a domain.
        far: One GPU's share of the network between domains.
        memory_bandwidth: GPU memory bandwidth in bytes/s.
        rates: Operations/s of dense matrix products by the bits of their operands; a multiply-add is two operations.
        kinds: Overhead and efficiency of each kind of step.
        sync: Seconds that the host loses when it must wait for a number from the GPU.
        cache: Bytes of a GPU's last-level cache. What kernels around a step move beyond it goes through memory. None:
            ignore memory traffic.
        memory_efficiency: Fraction of ``memory_bandwidth`` that these kernels attain.
        source: Where the figures come from.

    Raises:
        ConfigError: A figure is invalid.
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
        """Return the rate of matrix products for an operand width, or for the next wider one.

        Args:
            bits: Bits of the operands.

        Returns:
            Operations/s.
        """
        return self.rates[min((known for known in self.rates if known >= bits), default=16)]

    def fitted(self, samples: Iterable[Sample], source: str) -> Machine:
        """Return a copy with ``call`` and ``efficiency`` fitted to measured steps.

        The model is ``seconds = calls * call + latency + transfer / efficiency``, fitted by least squares of relative
        errors. Kinds that were timed together get the same values. A kind needs at least two samples of different
        sizes, otherwise it is unchanged. Values between domains are unchanged if no sample went there.

        Args:
            samples: The measurements.
            source: Description of where they come from.

        Returns:
            The fitted machine.
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
        """Return a JSON-ready dict that :meth:`from_json` reads."""
        return {
            **{f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("near", "far", "rates", "kinds")},
            "near": asdict(self.near),
            "far": asdict(self.far),
            "rates": {str(bits): rate for bits, rate in self.rates.items()},
            "kinds": {name: asdict(kind) for name, kind in self.kinds.items()},
        }

    @staticmethod
    def from_json(value: object) -> Machine:
        """Read the result of :meth:`to_json`.

        Args:
            value: Parsed JSON.

        Returns:
            The machine.

        Raises:
            ConfigError: The value is not a valid machine description.
        """
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
        """Load a machine by name or from a JSON file.

        Args:
            name: Name ("h200"), or path of a JSON file.

        Returns:
            The machine.

        Raises:
            ConfigError: The name is unknown, or the file is not valid.
        """
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
        """Return the known machine with a GPU.

        Args:
            name: Name of the GPU ("NVIDIA H200", "h200").

        Returns:
            The machine, or None for an unknown GPU.
        """
        words = name.lower().replace("-", " ").split()
        return next((MACHINES[word] for word in words if word in MACHINES), None)


def _least_squares(samples: list[Sample]) -> Kind | None:
    """Fit a kind to samples; None if they do not determine one."""
    # Relative errors: divide each sample by its seconds.
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
    """Build a machine from data sheet units.

    Args:
        name: Name of the card, whose rates are used.
        domain: GPUs per domain.
        near: GB/s of each direction within a domain.
        far: GB/s of each direction between domains.
        memory: TB/s of memory.
        cache: MB of cache.
        measured: Measured kinds of steps.
        where: What they were measured on.
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


#: Attained by layers of this package: benchmarks/distributed_model.py, with docs/results/several-gpus-h100.json and
#: docs/results/several-gpus.json. The latter predates sending results to all ranks at the same time, so push on the
#: H200 uses the fraction of the links that the H100 attains.
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

#: Hosts with eight GPUs and one network adapter per GPU (200 Gbit/s for A100, otherwise 400), and a rack with 72.
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
