"""Predicted cost of prepare/finalize classes: bytes, calls, hops and seconds, and figures of machines.

The command line compares classes by it; layers at runtime do not use it.

Routing is taken to be uniform (:mod:`moe_core.parallel.distributed.uniform_routing`).

**Seconds of a step** between ranks: the time of its kind before anything moves, the hops of its last byte, and the
larger of the NVLink time and the network time, each as bytes over the bandwidth of one GPU that the kind attains::

    call + near_hops * near.latency + far_hops * far.latency
         + max(near_bytes / (near * efficiency), far_bytes / (far * far_efficiency))

Kernels that write into the memory of other GPUs also read and write rows in their own GPU's memory while no link is
busy: tokens as they leave, results as they are added. The bytes of this that exceed the cache take time at the memory
bandwidth that such kernels attain. (Copies made by a library's collective are part of the bandwidth that it attains.)::

    max(memory_bytes - cache, 0) / (memory_bandwidth * memory_efficiency)

**Seconds of a layer**: compute plus the steps. Compute is the larger of weights over memory bandwidth and products over
the tensor core rate, a lower bound for the experts and not the time of a kernel. ``seconds`` adds everything up.
``overlapped``, where another batch is computed while tokens are in flight, is the larger of compute and transfer, plus
calls and hops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

from moe_core._support.atomic_write import as_path
from moe_core.errors import ConfigError, did_you_mean
from moe_core.parallel.distributed.uniform_routing import active_experts, expected_ranks
from moe_core.spec.cards import CARDS
from moe_core.spec.config import FusedMoEConfig, TokenSharing, whole_number
from moe_core.spec.quant_key import QuantKey

#: Bytes of routing per (token, expert) pair: a float32 weight and an int32 id.
ROUTING_BYTES = 8

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


#: figures of a machine that may be zero; all others are positive
_MAY_BE_ZERO = ("latency", "sync", "cache", "call")


def _figures(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of nested mappings, each with its dotted name."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _figures(value, f"{prefix}{name}.")
        elif value is not None and name not in ("name", "source"):
            yield f"{prefix}{name}", value


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
            raise ConfigError(f"machine {self.name}: unknown kind of step {unknown[0]!r}; known: {', '.join(KINDS)}")
        object.__setattr__(self, "kinds", {**_ASSUMED, **self.kinds})
        object.__setattr__(self, "rates", dict(self.rates))
        if 16 not in self.rates:
            raise ConfigError(f"machine {self.name}: rates is {dict(self.rates)}, expected that of 16 bits at least")
        for name, value in _figures(asdict(self)):
            optional = name.rpartition(".")[2] in _MAY_BE_ZERO
            if not 0 <= value < math.inf or not (value or optional):
                least = "0 or more" if optional else "a positive number"
                raise ConfigError(f"machine {self.name}: {name} is {value!r}, expected {least}")

    def rate(self, bits: int) -> float:
        """Return the rate of matrix products for an operand width, or for the next wider one.

        Args:
            bits: Bits of the operands.

        Returns:
            Operations/s.
        """
        return self.rates[min((known for known in self.rates if known >= bits), default=16)]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict that :meth:`from_json` reads."""
        return {**asdict(self), "rates": {str(bits): rate for bits, rate in self.rates.items()}}

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
            raise ConfigError(f"invalid machine description: {error}; expected {names}") from None

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


def payload_bytes(hidden_size: int, dtype_bytes: int, key: QuantKey | None) -> int:
    """Return the bytes of a token's hidden state in flight, including dynamic scales.

    Args:
        hidden_size: Hidden size K.
        dtype_bytes: Bytes per unquantized value.
        key: Quantization; None for unquantized.

    Returns:
        Number of bytes.
    """
    if key is None:
        return hidden_size * dtype_bytes
    codes = -(-hidden_size * key.dtype.bits // 8)
    return codes if key.scale.static else codes + key.group_shape.grid(1, hidden_size)[1] * key.scale.dtype.itemsize


@dataclass(frozen=True)
class Peers:
    """The ranks of a group as seen by one of them.

    Attributes:
        size: Number of ranks.
        near: Number of ranks in its domain, including itself.
    """

    size: int
    near: int

    @staticmethod
    def of(size: int, stride: int, domain: int) -> Peers:
        """Describe ranks at a fixed stride; uses the domain with the fewest of them.

        Args:
            size: Number of ranks.
            stride: Distance between consecutive ranks.
            domain: Number of ranks per domain.

        Returns:
            The peers.
        """
        counts: dict[int, int] = {}
        for member in range(0, size * stride, stride):
            counts[member // domain] = counts.get(member // domain, 0) + 1
        return Peers(size, min(counts.values()))

    @property
    def domains(self) -> int:
        """Number of domains that the ranks span."""
        return -(-self.size // self.near)

    @property
    def far(self) -> int:
        """Number of ranks in other domains."""
        return self.size - self.near


@dataclass(frozen=True)
class Step:
    """One communication call, as seen by a rank.

    Attributes:
        kind: Kind of step, one of :data:`KINDS`.
        near_bytes: Bytes sent over NVLink; the same number is received, since routing is uniform.
        far_bytes: Bytes sent over the network; the same number is received.
        near_hops: Hops of the last byte over NVLink.
        far_hops: Hops of the last byte over the network.
        syncs: Number of times that the host waits for a number from the GPU.
        memory_bytes: Bytes that its kernels read and write in a GPU's own memory, including writes of other GPUs.
    """

    kind: str
    near_bytes: float
    far_bytes: float
    near_hops: int
    far_hops: int
    syncs: int = 0
    memory_bytes: float = 0.0

    def latency(self, machine: Machine) -> float:
        """Return the seconds of calls, hops and host synchronization.

        Args:
            machine: The machine.

        Returns:
            Seconds.
        """
        hops = self.near_hops * machine.near.latency + self.far_hops * machine.far.latency
        return machine.kinds[self.kind].call + hops + self.syncs * machine.sync

    def transfer(self, machine: Machine) -> float:
        """Return the seconds to move the bytes, between GPUs and in memory.

        Args:
            machine: The machine.

        Returns:
            Seconds.
        """
        kind, near, far = machine.kinds[self.kind], machine.near.bandwidth, machine.far.bandwidth
        links = max(self.near_bytes / (near * kind.efficiency), self.far_bytes / (far * kind.far))
        if machine.cache is None:
            return links
        beyond = max(self.memory_bytes - machine.cache, 0.0)
        return links + beyond / (machine.memory_bandwidth * machine.memory_efficiency)


@dataclass(frozen=True)
class Traffic:
    """The data that a call moves between the ranks of a layer.

    Attributes:
        config: Config of a rank.
        tokens: Number of tokens M that each rank brings.
        domain: Number of GPUs that reach each other by NVLink.
        payload: Quantization of tokens before dispatch; None for unquantized.
    """

    config: FusedMoEConfig
    tokens: int
    domain: int
    payload: QuantKey | None = None

    @property
    def token_bytes(self) -> int:
        """Bytes of a token during dispatch, with its routing."""
        config = self.config
        state = payload_bytes(config.hidden_size, config.dtype.itemsize, self.payload)
        return state + ROUTING_BYTES * config.top_k

    @property
    def result_bytes(self) -> int:
        """Bytes of a result during combine."""
        return self.config.hidden_size * self.config.dtype.itemsize

    @property
    def travelling(self) -> Peers:
        """The ranks among which each brings separate tokens."""
        parallel = self.config.parallel
        if parallel.token_sharing is TokenSharing.NONE:
            return Peers.of(parallel.world_size, 1, self.domain)
        if parallel.token_sharing is TokenSharing.EP_RANK:
            return Peers.of(parallel.ep_size, parallel.tp_size, self.domain)
        return Peers(1, 1)

    def hit(self, groups: int) -> float:
        """Probability that a token goes to a given one of ``groups`` equal groups of ranks."""
        return float(expected_ranks(self.config.num_experts, groups, self.config.top_k)) / groups

    def sent(self, size: int, *, syncs: int = 0, memory_bytes: float = 0.0, kind: str) -> Step:
        """Return the step that sends ``size`` bytes of each token directly to every rank that it goes to."""
        hit = self.hit(self.config.parallel.ep_size)
        return direct(kind, self.travelling, hit * self.tokens * size, syncs, memory_bytes)

    def summing(self) -> tuple[Step, ...]:
        """All-reduce among ranks that bring the same tokens; empty if there are none."""
        parallel = self.config.parallel
        sharing = {TokenSharing.ALL: parallel.world_size, TokenSharing.EP_RANK: parallel.tp_size}
        size = sharing.get(parallel.token_sharing, 1)
        if size == 1:
            return ()
        peers = Peers.of(size, 1, self.domain)
        if self.config.batch_invariant and size > 2:
            return (ring(ALL_GATHER, peers, self.tokens * self.result_bytes),)
        # A reduce-scatter followed by an all-gather of slices.
        half = ring(ALL_REDUCE, peers, self.tokens * self.result_bytes / size)
        return (Step(ALL_REDUCE, 2 * half.near_bytes, 2 * half.far_bytes, 2 * half.near_hops, 2 * half.far_hops),)

    def scattering(self, peers: Peers, part: float) -> Step:
        """Return the step that leaves sums of ``part`` bytes on each rank.

        It is a reduce-scatter, or, for a fixed order, an all-to-all with local sums.
        """
        if self.config.batch_invariant and peers.size > 2:
            return direct(ALL_TO_ALL, peers, part)
        return ring(REDUCE_SCATTER, peers, part)


def ring(kind: str, peers: Peers, part: float) -> Step:
    """Return a ring collective, on as many rings as a domain has adapters.

    A rank forwards the slices of all others. The rings of a domain cross to the next one through different adapters, so
    each adapter carries its share of the data that the domain lacks.

    Args:
        kind: Kind of step.
        peers: The ranks.
        part: Bytes of each rank's slice.

    Returns:
        The step.
    """
    far = peers.far * part / peers.near
    crossings = peers.domains - 1
    return Step(kind, (peers.size - 1) * part - far, far, peers.size - 1 - crossings, crossings)


def direct(kind: str, peers: Peers, each: float, syncs: int = 0, memory_bytes: float = 0.0) -> Step:
    """Return a step that sends data directly to every other rank.

    Args:
        kind: Kind of step.
        peers: The ranks.
        each: Bytes for each rank.
        syncs: Number of host synchronizations.
        memory_bytes: As in :class:`Step`.

    Returns:
        The step.
    """
    crossing = peers.far > 0
    hops = int(peers.size > 1 > crossing), int(crossing)
    return Step(kind, (peers.near - 1) * each, peers.far * each, *hops, syncs, memory_bytes)


def forwarded(kind: str, peers: Peers, hit: float, domain_hit: float, size: float) -> Step:
    """Return a step that crosses the network once per domain and forwards by NVLink.

    Args:
        kind: Kind of step.
        peers: The ranks.
        hit: Probability that a token goes to a given rank.
        domain_hit: Probability that a token goes to a given domain. The rank that it arrives at keeps it in one of
            ``near`` cases.
        size: Bytes of all tokens of a rank.

    Returns:
        The step.
    """
    handed_on = (peers.near - 1) * hit * size * peers.domains
    hops = int(peers.near > 1), int(peers.far > 0)
    return Step(kind, handed_on, (peers.domains - 1) * domain_hit * size, *hops)


#: Steps before the experts, and steps after them.
Steps = tuple[tuple[Step, ...], tuple[Step, ...]]


def _reduce_scatter(traffic: Traffic) -> Steps:
    peers = Peers.of(traffic.config.parallel.world_size, 1, traffic.domain)
    return (), (traffic.scattering(peers, traffic.tokens * traffic.result_bytes / peers.size),)


def _allgather_reducescatter(traffic: Traffic) -> Steps:
    peers, tokens = traffic.travelling, traffic.tokens
    back = traffic.scattering(peers, tokens * traffic.result_bytes)
    return (ring(ALL_GATHER, peers, tokens * traffic.token_bytes),), (back, *traffic.summing())


def _alltoall(traffic: Traffic) -> Steps:
    if not traffic.travelling.far:
        # GPUs that reach each other's memory write into it directly; the host does not need the routing.
        return _low_latency(traffic)
    counts = direct(ALL_TO_ALL, traffic.travelling, 8.0, syncs=1)
    there, back = (traffic.sent(size, kind=ALL_TO_ALL) for size in (traffic.token_bytes, traffic.result_bytes))
    return (counts, there), (back, *traffic.summing())


def _low_latency(traffic: Traffic) -> Steps:
    ranks, tokens, size, result = traffic.travelling.size, traffic.tokens, traffic.token_bytes, traffic.result_bytes
    # Number of ranks that a token goes to, including this one; equally many rows arrive and leave.
    goes = traffic.hit(traffic.config.parallel.ep_size) * ranks
    there = traffic.sent(size, kind=PUSH, memory_bytes=tokens * (result + goes * size))
    # One row per rank, read where results are added (or written by the experts if no rank sent it), and the sum. Memory
    # time of results in flight, to this rank too, overlaps with other transfers on the links.
    back = traffic.sent(result, kind=PUSH, memory_bytes=tokens * result * (ranks + 1))
    return (there,), (back, *traffic.summing())


def _deepep(traffic: Traffic) -> Steps:
    peers = traffic.travelling
    hits = traffic.hit(traffic.config.parallel.ep_size), traffic.hit(max(peers.domains, 1))
    sizes = traffic.tokens * traffic.token_bytes, traffic.tokens * traffic.result_bytes
    there, back = (forwarded(PUSH, peers, *hits, size) for size in sizes)
    return (there,), (back, *traffic.summing())


#: Steps, keyed by the ``name`` of a prepare/finalize class. The exchange of token counts before an all-gather is
#: omitted: a caller that knows the counts passes them, and under CUDA graphs they are known.
STEPS: Mapping[str, Callable[[Traffic], Steps]] = MappingProxyType(
    {
        "none": lambda traffic: ((), ()),
        "all_reduce": lambda traffic: ((), traffic.summing()),
        "reduce_scatter": _reduce_scatter,
        "allgather_reducescatter": _allgather_reducescatter,
        "alltoall": _alltoall,
        "low_latency": _low_latency,
        "deepep": _deepep,
    }
)


@dataclass(frozen=True)
class LayerCost:
    """The cost of one call of a layer with a prepare/finalize class.

    Times are None without figures of the machine.

    Attributes:
        name: Name of the class.
        before: Communication steps before the experts.
        after: Communication steps after the experts.
        times: Seconds of a rank's experts at the hardware limit, of calls and hops, and of moving the bytes.
    """

    name: str
    before: tuple[Step, ...]
    after: tuple[Step, ...]
    times: tuple[float, float, float] | None = None

    @property
    def dispatch_bytes(self) -> float:
        """Bytes that a rank sends before the experts."""
        return sum(step.near_bytes + step.far_bytes for step in self.before)

    @property
    def combine_bytes(self) -> float:
        """Bytes that a rank sends after the experts."""
        return sum(step.near_bytes + step.far_bytes for step in self.after)

    @property
    def seconds(self) -> float | None:
        """Seconds without overlap; None without figures of the machine."""
        return None if self.times is None else sum(self.times)

    @property
    def overlapped(self) -> float | None:
        """Seconds if another batch is computed during transfers; None without a machine's figures."""
        return None if self.times is None else max(self.times[0], self.times[2]) + self.times[1]

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        compute, latency, transfer = self.times or (None, None, None)
        return {
            "name": self.name,
            "dispatch_bytes": self.dispatch_bytes,
            "combine_bytes": self.combine_bytes,
            "network_bytes": sum(step.far_bytes for step in (*self.before, *self.after)),
            "seconds_compute": compute,
            "seconds_latency": latency,
            "seconds_transfer": transfer,
            "seconds": self.seconds,
            "seconds_overlapped": self.overlapped,
        }


def layer_cost(
    name: str,
    config: FusedMoEConfig,
    tokens: int,
    machine: Machine | None,
    *,
    expert_bytes: float = 0.0,
    payload: QuantKey | None = None,
    product_bits: int = 16,
) -> LayerCost | None:
    """Estimate the cost of a call with a prepare/finalize class.

    Args:
        name: Name of the class.
        config: Config of a rank, with its ``intermediate_size``.
        tokens: Number of tokens per rank.
        machine: The machine; None to compute only bytes, with domains of eight GPUs.
        expert_bytes: Bytes of one expert's weights on a rank.
        payload: Quantization of tokens before dispatch; None for unquantized.
        product_bits: Bits of the tensor core operands.

    Returns:
        The cost, or None for a class of unknown cost.
    """
    if name not in STEPS:
        return None
    domain = 8 if machine is None else machine.domain
    before, after = STEPS[name](Traffic(config, whole_number("tokens", tokens, 0), domain, payload))
    if machine is None:
        return LayerCost(name, before, after)
    every = tokens * config.parallel.dp_size
    weights = expert_bytes * active_experts(config.num_experts, config.local_experts, config.top_k, every)
    steps = (*before, *after)
    times = (
        max(weights / machine.memory_bandwidth, products_of(config, every) / machine.rate(product_bits)),
        sum(step.latency(machine) for step in steps),
        sum(step.transfer(machine) for step in steps),
    )
    return LayerCost(name, before, after, times)


def products_of(config: FusedMoEConfig, tokens: int) -> float:
    """Return the number of operations of a rank's experts; a multiply-add is two.

    Args:
        config: Config of a rank.
        tokens: Number of distinct tokens that all ranks bring together.

    Returns:
        Number of operations.
    """
    pairs = tokens * config.top_k * config.local_experts / config.num_experts
    return 2.0 * pairs * (config.w13_rows + config.intermediate_size) * config.hidden_size


@dataclass(frozen=True)
class Line:
    """Communication time as a linear function of the tokens per rank.

    Latency does not depend on the number of tokens, and bytes are proportional to it. Memory traffic is counted without
    a cache.

    Attributes:
        start: Seconds for no tokens.
        slope: Seconds per token of a rank.
    """

    start: float
    slope: float

    @staticmethod
    def of(name: str, config: FusedMoEConfig, machine: Machine, payload: QuantKey | None = None) -> Line | None:
        """Return the line of a prepare/finalize class.

        Args:
            name: Name of the class.
            config: Config of a rank.
            machine: The machine.
            payload: Quantization of tokens before dispatch; None for unquantized.

        Returns:
            The line, or None for a class of unknown cost.
        """
        without = machine if machine.cache is None else replace(machine, cache=0.0)
        none, one = (layer_cost(name, config, count, without, payload=payload) for count in (0, 1))
        if none is None or one is None or none.times is None or one.times is None:
            return None
        start, first = (latency + transfer for _, latency, transfer in (none.times, one.times))
        return Line(start, first - start)

    def at(self, tokens: int) -> float:
        """Return the seconds for a number of tokens.

        Args:
            tokens: Number of tokens per rank.

        Returns:
            Seconds.
        """
        return self.start + self.slope * tokens


def fastest(lines: Mapping[str, Line]) -> tuple[tuple[int, str], ...]:
    """Return which class is fastest, by tokens per rank.

    For example ((1, "low_latency"), (300, "alltoall")): each entry holds from its number of tokens up to that of the
    next. Ties go to the first.

    Args:
        lines: Lines by name of the class.

    Returns:
        Pairs of a number of tokens and a name.
    """
    found: list[tuple[int, str]] = []
    tokens = 1
    while lines:
        best = min(lines, key=lambda name: (lines[name].at(tokens), lines[name].slope))
        found.append((tokens, best))
        mine = lines[best]
        nexts = [
            max(math.floor((line.start - mine.start) / (mine.slope - line.slope)), tokens) + 1
            for line in lines.values()
            # Differences from rounding count as equal.
            if line.slope < mine.slope * (1 - 1e-9)
        ]
        if not nexts:
            break
        tokens = min(nexts)
    return tuple(found)
