"""Communication cost model of prepare/finalize classes: bytes, calls, hops and seconds.

The model assumes uniform routing: a token's k experts are any k of the E, all sets equally likely, independent of other
tokens.

**Number of ranks that a token goes to.** A rank holds L of the E experts. Of the C(E, k) sets of experts, C(E - L, k)
contain none of its experts, so a token goes to it with probability ``p = 1 - C(E - L, k) / C(E, k)``. The number of
ranks that a token goes to is the sum over all ranks of an indicator. The expectation of a sum is the sum of the
expectations, even if the terms are dependent: ``P * p`` for P ranks that hold L experts each. With the experts of a
whole domain in place of L, the same formula counts domains. An expert has at least one of T independent tokens with
probability ``1 - (1 - k / E)**T``.

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

#: Bytes of routing per (token, expert) pair: a float32 weight and an int32 id.
ROUTING_BYTES = 8


def hit_probability(num_experts: int, held: int, top_k: int) -> Fraction:
    """Return the probability that a token chooses at least one of some experts.

    Args:
        num_experts: Number of experts E.
        held: Number of experts of interest.
        top_k: Number of experts per token.

    Returns:
        The exact probability.
    """
    return 1 - Fraction(math.comb(max(num_experts - held, 0), top_k), math.comb(num_experts, top_k))


@cache
def expected_ranks(num_experts: int, ep_size: int, top_k: int) -> Fraction:
    """Return the mean number of expert-parallel ranks that a token goes to.

    If ``ep_size`` does not divide E, the first ranks hold one expert more.

    Args:
        num_experts: Number of experts E.
        ep_size: Number of expert-parallel ranks.
        top_k: Number of experts per token.

    Returns:
        The exact mean.
    """
    each, more = divmod(num_experts, ep_size)
    return more * hit_probability(num_experts, each + 1, top_k) + (ep_size - more) * hit_probability(
        num_experts, each, top_k
    )


def active_experts(num_experts: int, held: int, top_k: int, tokens: int) -> float:
    """Return the mean number of experts that have at least one token.

    Args:
        num_experts: Number of experts E.
        held: Number of experts of interest.
        top_k: Number of experts per token.
        tokens: Number of tokens.

    Returns:
        The mean.
    """
    return held * (1 - (1 - top_k / num_experts) ** tokens)


def payload_bytes(hidden_size: int, dtype_bytes: int, key: QuantKey | None) -> int:
    """Return the bytes of a token's hidden state in flight, including dynamic scales.

    Args:
        hidden_size: Hidden size K.
        dtype_bytes: Bytes per unquantized value.
        key: Quantization; None for unquantized.

    Returns:
        Number of bytes.
    """
    check_one_level(key, "payload")
    if key is None:
        return hidden_size * dtype_bytes
    codes = -(-hidden_size * key.dtype.bits // 8)
    return codes if key.is_static else codes + key.group_shape.grid(1, hidden_size)[1] * key.scale.dtype.itemsize


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
        kind: Kind of step, see :mod:`.machine`.
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
        return links + self.memory(machine)

    def memory(self, machine: Machine) -> float:
        """Return the seconds to move the bytes in a GPU's own memory.

        Args:
            machine: The machine.

        Returns:
            Seconds.
        """
        if machine.cache is None:
            return 0.0
        return max(self.memory_bytes - machine.cache, 0.0) / (machine.memory_bandwidth * machine.memory_efficiency)

    def wire(self, machine: Machine) -> float:
        """Return the seconds to move the bytes at full link bandwidth.

        Args:
            machine: The machine.

        Returns:
            Seconds.
        """
        return max(self.near_bytes / machine.near.bandwidth, self.far_bytes / machine.far.bandwidth)

    def hops(self, machine: Machine) -> float:
        """Return the seconds of hops and host synchronization.

        Args:
            machine: The machine.

        Returns:
            Seconds.
        """
        return self.latency(machine) - machine.kinds[self.kind].call


@dataclass(frozen=True)
class Traffic:
    """The data that a call moves between the ranks of a layer.

    Attributes:
        parallel: The ranks, and which of them bring the same tokens.
        num_experts: Number of experts E.
        top_k: Number of experts per token.
        tokens: Number of tokens M that each rank brings.
        token_bytes: Bytes of a hidden state during dispatch.
        result_bytes: Bytes of a result during combine.
        domain: Number of GPUs that reach each other by NVLink.
        fixed_order: Whether ranks are summed in a fixed order, as in batch-invariant layers.
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
        """Describe the traffic of a layer's call.

        Args:
            config: Config of a rank.
            tokens: Number of tokens per rank.
            domain: Number of GPUs that reach each other by NVLink.
            payload: Quantization of tokens before dispatch; None for unquantized.

        Returns:
            The traffic.
        """
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
        """The ranks among which each brings separate tokens."""
        parallel = self.parallel
        if parallel.token_sharing is TokenSharing.NONE:
            return Peers.of(parallel.world_size, 1, self.domain)
        if parallel.token_sharing is TokenSharing.EP_RANK:
            return Peers.of(parallel.ep_size, parallel.tp_size, self.domain)
        return Peers(1, 1)

    @property
    def hit(self) -> float:
        """Probability that a token goes to a given rank of :attr:`travelling`."""
        return float(expected_ranks(self.num_experts, self.parallel.ep_size, self.top_k)) / self.parallel.ep_size

    def summing(self) -> tuple[Step, ...]:
        """All-reduce among ranks that bring the same tokens; empty if there are none."""
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
        # A reduce-scatter followed by an all-gather of slices.
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
        """Return the step that leaves sums on each rank.

        It is a reduce-scatter, or, for a fixed order, an all-to-all with local sums.

        Args:
            peers: The ranks.
            part: Bytes of sums per rank.

        Returns:
            The step.
        """
        if self.fixed_order and peers.size > 2:
            return direct(ALL_TO_ALL, peers, 1.0, 1, part)
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


def direct(kind: str, peers: Peers, hit: float, tokens: int, size: float, syncs: int = 0) -> Step:
    """Return a step that sends each token directly to every rank that it goes to.

    Args:
        kind: Kind of step.
        peers: The ranks.
        hit: Probability that a token goes to a given rank.
        tokens: Number of tokens.
        size: Bytes per token.
        syncs: Number of host synchronizations.

    Returns:
        The step.
    """
    each = hit * tokens * size
    crossing = peers.far > 0
    return Step(kind, (peers.near - 1) * each, peers.far * each, int(peers.size > 1 > crossing), int(crossing), syncs)


def forwarded(kind: str, peers: Peers, hit: float, domain_hit: float, tokens: int, size: float) -> Step:
    """Like :func:`direct`, but cross the network once per domain and forward by NVLink.

    Args:
        kind: Kind of step.
        peers: The ranks.
        hit: Probability that a token goes to a given rank.
        domain_hit: Probability that a token goes to a given domain. The rank that it arrives at keeps it in one of
            ``near`` cases.
        tokens: Number of tokens.
        size: Bytes per token.

    Returns:
        The step.
    """
    each = tokens * size
    handed_on = (peers.near - 1) * hit * each * peers.domains
    hops = int(peers.near > 1), int(peers.far > 0)
    return Step(kind, handed_on, (peers.domains - 1) * domain_hit * each, *hops)


#: Steps before the experts, and steps after them.
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
        # GPUs that reach each other's memory write into it directly; the host does not need the routing.
        return _low_latency(traffic)
    counts = direct(ALL_TO_ALL, peers, 1.0, 1, 8, syncs=1)
    there = direct(ALL_TO_ALL, peers, hit, tokens, traffic.token_bytes + ROUTING_BYTES * traffic.top_k)
    back = direct(ALL_TO_ALL, peers, hit, tokens, traffic.result_bytes)
    return (counts, there), (back, *traffic.summing())


def _low_latency(traffic: Traffic) -> Steps:
    peers, hit, tokens = traffic.travelling, traffic.hit, traffic.tokens
    size = traffic.token_bytes + ROUTING_BYTES * traffic.top_k
    # Number of ranks that a token goes to, including this one; equally many rows arrive and leave.
    goes = hit * peers.size
    there = direct(PUSH, peers, hit, tokens, size)
    there = replace(there, memory_bytes=tokens * (traffic.result_bytes + goes * size))
    # One row per rank, read where results are added (or written by the experts if no rank sent it), and the sum. Memory
    # time of results in flight, to this rank too, overlaps with other transfers on the links.
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


#: Steps by the ``name`` of a prepare/finalize class. The exchange of token counts before an all-gather is omitted: a
#: caller that knows the counts passes them, and under CUDA graphs they are known.
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
    """The cost of one call of a layer with a prepare/finalize class.

    Times are None without figures of the machine.

    Attributes:
        name: Name of the class.
        before: Communication steps before the experts.
        after: Communication steps after the experts.
        compute: Seconds of a rank's experts at the hardware limit.
        latency: Seconds of calls and hops of the steps.
        transfer: Seconds to move the bytes of the steps.
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
        """Seconds without overlap; None without figures of the machine."""
        if self.compute is None or self.latency is None or self.transfer is None:
            return None
        return self.compute + self.latency + self.transfer

    @property
    def overlapped(self) -> float | None:
        """Seconds if another batch is computed during transfers; None without a machine's figures."""
        if self.compute is None or self.latency is None or self.transfer is None:
            return None
        return max(self.compute, self.transfer) + self.latency

    def sample(self, machine: Machine, seconds: float) -> Sample:
        """Combine the steps with a measured time, as input for :meth:`Machine.fitted`.

        Args:
            machine: The machine.
            seconds: Measured seconds of all steps together.

        Returns:
            The sample.
        """
        steps = (*self.before, *self.after)
        known = sum(step.hops(machine) + step.memory(machine) for step in steps)
        wires = sum(step.wire(machine) for step in steps)
        far = any(step.far_bytes for step in steps)
        return Sample(tuple(step.kind for step in steps), known, wires, seconds, len(steps), far)

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
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
    """Estimate the cost of a call with a prepare/finalize class.

    Args:
        name: Name of the class.
        config: Config of a rank, with its ``intermediate_size``.
        tokens: Number of tokens per rank.
        machine: The machine; None to compute only bytes.
        expert_bytes: Bytes of one expert's weights on a rank.
        payload: Quantization of tokens before dispatch; None for unquantized.
        product_bits: Bits of the tensor core operands.
        domain: Number of near GPUs. Default: that of the machine, else 8.

    Returns:
        The cost, or None for a class of unknown cost.
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
    """Return the time of a rank's experts at the hardware limit.

    It is the larger of reading the weights of experts that have tokens, and the products.

    Args:
        config: Config of a rank.
        tokens: Number of tokens per rank.
        machine: The machine.
        expert_bytes: Bytes of one expert's weights on a rank.
        product_bits: Bits of the tensor core operands.

    Returns:
        Seconds.
    """
    every = tokens * config.parallel.dp_size
    weights = expert_bytes * active_experts(config.num_experts, config.local_experts, config.top_k, every)
    return max(weights / machine.memory_bandwidth, products_of(config, every) / machine.rate(product_bits))


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
        if none is None or one is None:
            return None
        start, first = ((cost.latency or 0.0) + (cost.transfer or 0.0) for cost in (none, one))
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
