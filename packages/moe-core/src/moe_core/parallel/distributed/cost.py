"""What communication of each prepare/finalize class costs: bytes, calls and hops between ranks, seconds per layer.

Routing is taken to be uniform: a token's k experts are any k of the E, all sets of them equally likely, independently
of other tokens.

**How many ranks a token goes to.** A rank holds L of the E experts.  Of the C(E, k) sets of experts, C(E - L, k) have
none of its own, so a token goes to it with the probability ``p = 1 - C(E - L, k) / C(E, k)``.  The number of ranks that
it goes to is the sum over all ranks of "it goes there" (1 or 0), and the expectation of a sum is the sum of the
expectations, whether the parts depend on each other or not: ``P * p`` for P ranks that hold L each.  The same with the
experts of a whole domain in place of L counts domains.  And an expert has at least one of T independent tokens with the
probability ``1 - (1 - k / E)**T``.

**Seconds of a step** between ranks: what its kind takes before anything moves, the hops that its last byte makes, and
the larger of bytes over NVLink and bytes over the network, each over the bandwidth of one GPU that the kind attains::

    call + near_hops * near.latency + far_hops * far.latency
         + max(near_bytes / (near * efficiency), far_bytes / (far * far_efficiency))

Kernels that write into other GPUs' memory also read and write rows in their own GPU's while no link is busy: tokens as
they leave, results as they are added.  What of that exceeds the cache takes its bytes over the bandwidth of memory that
such kernels attain (what a library's collective copies by itself is in the bandwidth that it attains)::

    max(memory_bytes - cache, 0) / (memory_bandwidth * memory_efficiency)

**Seconds of a layer**: the larger of weights over memory bandwidth and products over the tensor cores' rate (the
experts' share at its limit, no kernel's time), and the steps.  One after the other (``seconds``); or, where another
batch is computed while tokens travel (``overlapped``), the larger of computing and moving bytes, and calls and hops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from types import MappingProxyType
from typing import Any

from moe_core.parallel.distributed.machine import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    PUSH,
    REDUCE_SCATTER,
    Machine,
    Sample,
)
from moe_core.spec.config import FusedMoEConfig, FusedMoEParallelConfig, TokenSharing, whole_number
from moe_core.spec.quant_key import QuantKey, check_one_level

#: bytes of a slot's routing: a float32 weight and an int32 id
ROUTING_BYTES = 8


def hit_probability(num_experts: int, held: int, top_k: int) -> Fraction:
    """The probability that a token has at least one of ``held`` experts among its ``top_k`` of ``num_experts``."""
    return 1 - Fraction(math.comb(max(num_experts - held, 0), top_k), math.comb(num_experts, top_k))


@cache
def expected_ranks(num_experts: int, ep_size: int, top_k: int) -> Fraction:
    """How many expert-parallel ranks a token goes to on average, where the first hold one more if E does not divide."""
    each, more = divmod(num_experts, ep_size)
    return more * hit_probability(num_experts, each + 1, top_k) + (ep_size - more) * hit_probability(
        num_experts, each, top_k
    )


def active_experts(num_experts: int, held: int, top_k: int, tokens: int) -> float:
    """How many of ``held`` experts have at least one of ``tokens`` on average."""
    return held * (1 - (1 - top_k / num_experts) ** tokens)


def payload_bytes(hidden_size: int, dtype_bytes: int, key: QuantKey | None) -> int:
    """Bytes of a token's hidden state as it travels: as it is (``key`` None), or quantised with its dynamic scales."""
    check_one_level(key, "payload")
    if key is None:
        return hidden_size * dtype_bytes
    codes = -(-hidden_size * key.dtype.bits // 8)
    return codes if key.is_static else codes + key.group_shape.grid(1, hidden_size)[1] * key.scale.dtype.itemsize


@dataclass(frozen=True)
class Peers:
    """The ranks of a group as one of them sees them: ``size`` in all, ``near`` of them in its domain, itself too."""

    size: int
    near: int

    @staticmethod
    def of(size: int, stride: int, domain: int) -> Peers:
        """``size`` ranks that are ``stride`` apart, in domains of ``domain`` ranks; the domain that has fewest."""
        counts: dict[int, int] = {}
        for member in range(0, size * stride, stride):
            counts[member // domain] = counts.get(member // domain, 0) + 1
        return Peers(size, min(counts.values()))

    @property
    def domains(self) -> int:
        return -(-self.size // self.near)

    @property
    def far(self) -> int:
        """Ranks of other domains."""
        return self.size - self.near


@dataclass(frozen=True)
class Step:
    """One call between ranks, as a rank sees it.

    ``near_bytes`` and ``far_bytes`` that it sends (and receives: the same where routing is uniform) over NVLink and
    over the network; ``near_hops`` and ``far_hops`` that the last byte makes; ``kind`` of :mod:`.machine`; ``syncs``:
    how often the host waits for a number from the GPU; ``memory_bytes`` that its kernels read and write in a GPU's own
    memory, others' writes too.
    """

    kind: str
    near_bytes: float
    far_bytes: float
    near_hops: int
    far_hops: int
    syncs: int = 0
    memory_bytes: float = 0.0

    def latency(self, machine: Machine) -> float:
        """Seconds of its calls and hops."""
        hops = self.near_hops * machine.near.latency + self.far_hops * machine.far.latency
        return machine.kinds[self.kind].call + hops + self.syncs * machine.sync

    def transfer(self, machine: Machine) -> float:
        """Seconds that its bytes take, between GPUs and in memory."""
        kind, near, far = machine.kinds[self.kind], machine.near.bandwidth, machine.far.bandwidth
        links = max(self.near_bytes / (near * kind.efficiency), self.far_bytes / (far * kind.far))
        return links + self.memory(machine)

    def memory(self, machine: Machine) -> float:
        """Seconds that its bytes take in a GPU's own memory."""
        if machine.cache is None:
            return 0.0
        return max(self.memory_bytes - machine.cache, 0.0) / (machine.memory_bandwidth * machine.memory_efficiency)

    def wire(self, machine: Machine) -> float:
        """Seconds that its bytes take at the links' whole bandwidth."""
        return max(self.near_bytes / machine.near.bandwidth, self.far_bytes / machine.far.bandwidth)

    def hops(self, machine: Machine) -> float:
        """Seconds of its hops, and of the host's waiting."""
        return self.latency(machine) - machine.kinds[self.kind].call


@dataclass(frozen=True)
class Traffic:
    """What a call moves between the ranks of a layer.

    - ``parallel``: the ranks, and which of them bring the same tokens
    - ``num_experts`` E, ``top_k``
    - ``tokens`` M that each rank brings
    - ``token_bytes`` of a hidden state on its way to the experts, ``result_bytes`` of a result
    - ``domain``: GPUs that reach each other by NVLink
    - ``fixed_order``: ranks are added up in one order, as batch-invariant layers do
    """

    parallel: FusedMoEParallelConfig
    num_experts: int
    top_k: int
    tokens: int
    token_bytes: int
    result_bytes: int
    domain: int
    fixed_order: bool = False

    @staticmethod
    def of(config: FusedMoEConfig, tokens: int, domain: int, payload: QuantKey | None = None) -> Traffic:
        """That of a layer's call with ``tokens`` tokens per rank, quantised as ``payload`` before they travel."""
        width = config.hidden_size, config.dtype.itemsize
        return Traffic(
            config.parallel,
            config.num_experts,
            config.top_k,
            whole_number("tokens", tokens, 0),
            payload_bytes(*width, payload),
            payload_bytes(*width, None),
            domain,
            config.batch_invariant,
        )

    @property
    def travelling(self) -> Peers:
        """The ranks among which each has tokens of its own."""
        parallel = self.parallel
        if parallel.token_sharing is TokenSharing.NONE:
            return Peers.of(parallel.world_size, 1, self.domain)
        if parallel.token_sharing is TokenSharing.EP_RANK:
            return Peers.of(parallel.ep_size, parallel.tp_size, self.domain)
        return Peers(1, 1)

    @property
    def hit(self) -> float:
        """The probability that a token goes to a given rank of :attr:`travelling`."""
        return float(expected_ranks(self.num_experts, self.parallel.ep_size, self.top_k)) / self.parallel.ep_size

    def summing(self) -> tuple[Step, ...]:
        """The all-reduce of ranks that brought the same tokens; nothing where none did."""
        parallel = self.parallel
        size = {TokenSharing.ALL: parallel.world_size, TokenSharing.EP_RANK: parallel.tp_size}.get(
            parallel.token_sharing, 1
        )
        if size == 1:
            return ()
        peers = Peers.of(size, 1, self.domain)
        if self.fixed_order and size > 2:
            return (ring(ALL_GATHER, peers, self.tokens * self.result_bytes),)
        part = self.tokens * self.result_bytes / size
        # a reduce-scatter, then an all-gather, of parts
        scatter = ring(ALL_REDUCE, peers, part)
        return (
            Step(
                ALL_REDUCE,
                2 * scatter.near_bytes,
                2 * scatter.far_bytes,
                2 * scatter.near_hops,
                2 * scatter.far_hops,
            ),
        )

    def scattering(self, peers: Peers, part: float) -> Step:
        """``part`` bytes of sums for each of ``peers``: a reduce-scatter, or parts sent to be added there."""
        if self.fixed_order and peers.size > 2:
            return direct(ALL_TO_ALL, peers, 1.0, 1, part)
        return ring(REDUCE_SCATTER, peers, part)


def ring(kind: str, peers: Peers, part: float) -> Step:
    """A collective on rings: ``part`` bytes of every rank go around, on as many rings as a domain has adapters.

    A rank passes on the parts of all others.  The rings of a domain cross to the next one through different adapters,
    so each of these carries its share of what the domain does not have.
    """
    far = peers.far * part / peers.near
    crossings = peers.domains - 1
    return Step(kind, (peers.size - 1) * part - far, far, peers.size - 1 - crossings, crossings)


def direct(kind: str, peers: Peers, hit: float, tokens: int, size: float, syncs: int = 0) -> Step:
    """``size`` bytes of each token straight to every rank that it goes to, with probability ``hit`` for each."""
    each = hit * tokens * size
    crossing = peers.far > 0
    return Step(kind, (peers.near - 1) * each, peers.far * each, int(peers.size > 1 > crossing), int(crossing), syncs)


def forwarded(kind: str, peers: Peers, hit: float, domain_hit: float, tokens: int, size: float) -> Step:
    """As :func:`direct`, but over the network once per domain, where a rank hands it on by NVLink.

    ``domain_hit``: the probability that a token goes to a given domain.  The rank that it arrives at keeps it in one of
    ``near`` cases.
    """
    each = tokens * size
    handed_on = (peers.near - 1) * hit * each * peers.domains
    hops = int(peers.near > 1), int(peers.far > 0)
    return Step(kind, handed_on, (peers.domains - 1) * domain_hit * each, *hops)


#: the steps before the experts, and those after them
Steps = tuple[tuple[Step, ...], tuple[Step, ...]]


def _none(traffic: Traffic) -> Steps:
    return (), ()


def _all_reduce(traffic: Traffic) -> Steps:
    return (), traffic.summing()


def _reduce_scatter(traffic: Traffic) -> Steps:
    peers = Peers.of(traffic.parallel.world_size, 1, traffic.domain)
    return (), (traffic.scattering(peers, traffic.tokens * traffic.result_bytes / peers.size),)


def _allgather_reducescatter(traffic: Traffic) -> Steps:
    peers, tokens = traffic.travelling, traffic.tokens
    there = ring(ALL_GATHER, peers, tokens * (traffic.token_bytes + ROUTING_BYTES * traffic.top_k))
    back = traffic.scattering(peers, tokens * traffic.result_bytes)
    return (there,), (back, *traffic.summing())


def _alltoall(traffic: Traffic) -> Steps:
    peers, hit, tokens = traffic.travelling, traffic.hit, traffic.tokens
    if not peers.far:
        # GPUs that reach each other's memory write into it, and the host need not know the routing
        return _low_latency(traffic)
    counts = direct(ALL_TO_ALL, peers, 1.0, 1, 8, syncs=1)
    there = direct(ALL_TO_ALL, peers, hit, tokens, traffic.token_bytes + ROUTING_BYTES * traffic.top_k)
    back = direct(ALL_TO_ALL, peers, hit, tokens, traffic.result_bytes)
    return (counts, there), (back, *traffic.summing())


def _low_latency(traffic: Traffic) -> Steps:
    peers, hit, tokens = traffic.travelling, traffic.hit, traffic.tokens
    size = traffic.token_bytes + ROUTING_BYTES * traffic.top_k
    # ranks that a token goes to, this one too; as many rows come as leave
    goes = hit * peers.size
    there = direct(PUSH, peers, hit, tokens, size)
    there = replace(there, memory_bytes=tokens * (traffic.result_bytes + goes * size))
    # a row of each rank, read where results are added or, if nobody sent it, written by the experts; and the sum.  What
    # results take of the memory on their way, to this rank too, they take while others cross the links
    passes = peers.size + 1
    back = direct(PUSH, peers, hit, tokens, traffic.result_bytes)
    back = replace(back, memory_bytes=tokens * traffic.result_bytes * passes)
    return (there,), (back, *traffic.summing())


def _deepep(traffic: Traffic) -> Steps:
    peers, tokens = traffic.travelling, traffic.tokens
    groups = max(peers.domains, 1)
    domain_hit = float(expected_ranks(traffic.num_experts, groups, traffic.top_k)) / groups
    size = traffic.token_bytes + ROUTING_BYTES * traffic.top_k
    there = forwarded(PUSH, peers, traffic.hit, domain_hit, tokens, size)
    back = forwarded(PUSH, peers, traffic.hit, domain_hit, tokens, traffic.result_bytes)
    return (there,), (back, *traffic.summing())


#: by the ``name`` of a prepare/finalize class; where ranks tell each other how many tokens they bring, that is left out
#: of an all-gather: a caller that knows it says so, and under CUDA graphs it is known
STEPS: Mapping[str, Callable[[Traffic], Steps]] = MappingProxyType(
    {
        "none": _none,
        "all_reduce": _all_reduce,
        "reduce_scatter": _reduce_scatter,
        "allgather_reducescatter": _allgather_reducescatter,
        "alltoall": _alltoall,
        "low_latency": _low_latency,
        "deepep": _deepep,
    }
)


@dataclass(frozen=True)
class LayerCost:
    """What one call of a layer takes with the prepare/finalize class of that ``name``.

    ``before`` and ``after``: its steps between ranks; ``compute``, ``latency``, ``transfer`` in seconds, None without
    figures of the machine: the experts' share of a rank at its limit, calls and hops of the steps, bytes of the steps.
    """

    name: str
    before: tuple[Step, ...]
    after: tuple[Step, ...]
    compute: float | None = None
    latency: float | None = None
    transfer: float | None = None

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
        """One after the other; None without figures of the machine."""
        if self.compute is None or self.latency is None or self.transfer is None:
            return None
        return self.compute + self.latency + self.transfer

    @property
    def overlapped(self) -> float | None:
        """Where another batch is computed while tokens travel; None without figures of the machine."""
        if self.compute is None or self.latency is None or self.transfer is None:
            return None
        return max(self.compute, self.transfer) + self.latency

    def sample(self, machine: Machine, seconds: float) -> Sample:
        """What :meth:`Machine.fitted` takes of its steps, which took measured ``seconds`` together."""
        steps = (*self.before, *self.after)
        known = sum(step.hops(machine) + step.memory(machine) for step in steps)
        wires = sum(step.wire(machine) for step in steps)
        far = any(step.far_bytes for step in steps)
        return Sample(tuple(step.kind for step in steps), known, wires, seconds, len(steps), far)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        steps = (*self.before, *self.after)
        return {
            "name": self.name,
            "dispatch_bytes": self.dispatch_bytes,
            "combine_bytes": self.combine_bytes,
            "network_bytes": sum(step.far_bytes for step in steps),
            "seconds_compute": self.compute,
            "seconds_latency": self.latency,
            "seconds_transfer": self.transfer,
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
    domain: int | None = None,
) -> LayerCost | None:
    """What a call with ``tokens`` tokens per rank takes; None for a ``name`` of which no cost is known.

    ``config`` is a rank's (its ``intermediate_size`` too); ``machine`` None: bytes alone, ``domain`` (default: the
    machine's, else 8) then says which ranks are near; ``expert_bytes`` of one expert's weights on a rank; ``payload``:
    how tokens are quantised before they travel; ``product_bits`` of the tensor cores' operands.
    """
    steps = STEPS.get(name)
    if steps is None:
        return None
    near = domain or (8 if machine is None else machine.domain)
    before, after = steps(Traffic.of(config, tokens, near, payload))
    if machine is None:
        return LayerCost(name, before, after)
    every = (*before, *after)
    return LayerCost(
        name,
        before,
        after,
        compute_seconds(config, tokens, machine, expert_bytes, product_bits),
        sum(step.latency(machine) for step in every),
        sum(step.transfer(machine) for step in every),
    )


def compute_seconds(
    config: FusedMoEConfig, tokens: int, machine: Machine, expert_bytes: float, product_bits: int
) -> float:
    """Seconds of a rank's experts at their limit: weights of those that have tokens, or products, whichever is more."""
    every = tokens * config.parallel.dp_size
    weights = expert_bytes * active_experts(config.num_experts, config.local_experts, config.top_k, every)
    return max(weights / machine.memory_bandwidth, products_of(config, every) / machine.rate(product_bits))


def products_of(config: FusedMoEConfig, tokens: int) -> float:
    """Operations of a rank's experts (a multiply-add is two) where the ranks bring ``tokens`` different ones in all."""
    pairs = tokens * config.top_k * config.local_experts / config.num_experts
    return 2.0 * pairs * (config.w13_rows + config.intermediate_size) * config.hidden_size


@dataclass(frozen=True)
class Line:
    """Seconds that steps between ranks take: ``start``, and ``slope`` for each token that a rank brings.

    Latency does not depend on the number of tokens, and bytes are proportional to it; those in memory are counted
    without a cache.
    """

    start: float
    slope: float

    @staticmethod
    def of(name: str, config: FusedMoEConfig, machine: Machine, payload: QuantKey | None = None) -> Line | None:
        """That of the class of that name; None for one of which no cost is known."""
        without = machine if machine.cache is None else replace(machine, cache=0.0)
        none, one = (layer_cost(name, config, count, without, payload=payload) for count in (0, 1))
        if none is None or one is None:
            return None
        start, first = ((cost.latency or 0.0) + (cost.transfer or 0.0) for cost in (none, one))
        return Line(start, first - start)

    def at(self, tokens: int) -> float:
        return self.start + self.slope * tokens


def fastest(lines: Mapping[str, Line]) -> tuple[tuple[int, str], ...]:
    """The name of what moves tokens in the least time, by tokens per rank: ((1, "low_latency"), (300, "alltoall")).

    Each holds from its number of tokens up to the next one's; of equal ones the first.
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
            # what differs by roundings is equal
            if line.slope < mine.slope * (1 - 1e-9)
        ]
        if not nexts:
            break
        tokens = min(nexts)
    return tuple(found)
