"""Prepare/finalize class of a layer over several ranks: which fit which backends, which is fastest, as text.

Each class is examined with every backend: selection checks a backend against the claims of the prepare/finalize class
named by the layer's config (:meth:`moe_core.selection.oracle.Oracle.select`). Like selection, this is a pure function.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from moe_core.cli._output import bytes_text, duration, table
from moe_core.errors import ConfigError, did_you_mean
from moe_core.interface.prepare_finalize import FusedMoEPrepareAndFinalizeModular
from moe_core.parallel.distributed.cost import MACHINES, LayerCost, Line, Machine, fastest, layer_cost
from moe_core.parallel.prepare_finalize.by_name import ALL2ALL_BACKENDS, REDUCTIONS, load_prepare_finalize
from moe_core.selection.memory import example_weights
from moe_core.selection.oracle import Oracle, as_device_info
from moe_core.selection.report import (
    BackendRefusedError,
    Candidate,
    NoBackendError,
    Selection,
    SelectionReport,
    one_of_each,
)
from moe_core.spec.config import FusedMoEConfig, TokenSharing
from moe_core.spec.device import DeviceInfo
from moe_core.spec.environment import Environment
from moe_core.spec.quant_key import QuantKey

if TYPE_CHECKING:
    from moe_core.kernels.tuning.profile import TuningProfile


@dataclass(frozen=True)
class PrepareFinalizeCandidate:
    """One prepare/finalize class that was considered.

    Attributes:
        cls: The class.
        reasons: Reasons against it with any backend. If empty, it works with the backends that fit in ``report``.
        report: Selection report on every backend behind this class.
        selection: Selection of the first backend that fits, if any.
        payload: Quantization of tokens before dispatch; None if they are not quantized.
        cost: Cost of a call; None if unknown.
    """

    cls: type[FusedMoEPrepareAndFinalizeModular]
    reasons: tuple[str, ...]
    report: SelectionReport
    selection: Selection | None
    payload: QuantKey | None
    cost: LayerCost | None

    @property
    def name(self) -> str:
        """Name of the class."""
        return self.cls.name

    @property
    def fits(self) -> bool:
        """Whether the class can serve the layer with some backend."""
        return self.selection is not None

    @property
    def seconds(self) -> float:
        """Seconds of a call; infinity if unknown."""
        seconds = None if self.cost is None else self.cost.seconds
        return float("inf") if seconds is None else seconds

    @property
    def cuda_graph(self) -> bool:
        """Whether calls can be captured, according to both the class and its backend."""
        chosen = self.report.chosen
        return self.cls.claims.cuda_graph and chosen is not None and chosen.experts.claims.cuda_graph

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict with every backend and its reasons."""
        return {
            "name": self.name,
            "class": f"{self.cls.__module__}:{self.cls.__qualname__}",
            "fits": self.fits,
            "reasons": list(self.reasons),
            "backend": None if self.report.chosen is None else self.report.chosen.backend,
            "cuda_graph": self.cuda_graph,
            "quantized_before": None if self.payload is None else str(self.payload),
            "verified_on": list(self.cls.claims.verified_on),
            "pairs": [
                {"backend": c.backend, "experts": c.experts.__qualname__, "fits": c.fits, "reasons": list(c.reasons)}
                for c in self.report.candidates
                if c.takes_keys
            ],
            "cost": None if self.cost is None else self.cost.as_dict(),
        }


@dataclass(frozen=True)
class PrepareFinalizeSelection:
    """All prepare/finalize classes for the ranks of a layer, and the chosen one.

    Attributes:
        tokens: Number of tokens that each rank brings.
        requested: Name of a class, or "auto". The latter is the fastest by the figures of ``machine``, or without
            figures the first that fits. If all ranks have the same tokens, it is the class that gives each of them the
            whole output.
        candidates: All classes.
        chosen: The chosen class, if any.
        machine: Machine whose figures are used, if known.
        fastest: Pairs of a number of tokens per rank and the name of the class that is fastest from there on, among
            those that fit.
    """

    tokens: int
    requested: str
    candidates: tuple[PrepareFinalizeCandidate, ...]
    chosen: PrepareFinalizeCandidate | None
    machine: Machine | None
    fastest: tuple[tuple[int, str], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        parallel = self.candidates[0].report.config.parallel
        return {
            "tp_size": parallel.tp_size,
            "ep_size": parallel.ep_size,
            "dp_size": parallel.dp_size,
            "tokens_per_rank": self.tokens,
            "requested": self.requested,
            "chosen": None if self.chosen is None else self.chosen.name,
            "machine": None if self.machine is None else self.machine.to_json(),
            "fastest": [{"from_tokens": tokens, "name": name} for tokens, name in self.fastest],
            "prepare_finalize": [candidate.as_dict() for candidate in self.candidates],
        }


def select_prepare_finalize(
    oracle: Oracle,
    config: FusedMoEConfig,
    *,
    weight_key: QuantKey | None,
    activation_key: QuantKey | None,
    tokens: int,
    all2all: str = "auto",
    moe_backend: str = "auto",
    device: DeviceInfo | str | torch.device | None = None,
    environment: Environment | None = None,
    tuning: TuningProfile | str | Path | None = None,
    machine: Machine | None = None,
) -> PrepareFinalizeSelection:
    """Select the prepare/finalize class for a layer over several ranks.

    Every class is examined with every backend.
    Args:
        oracle: Oracle of the scheme.
        config: Config of a rank's shard. Its ``parallel`` defines the number of ranks and which of them bring the same
            tokens.
        weight_key: As in :meth:`Oracle.select`.
        activation_key: As in :meth:`Oracle.select`.
        tokens: Number of tokens that each rank brings.
        all2all: Name of a class, or "auto".
        moe_backend: As in :meth:`Oracle.select`.
        device: As in :meth:`Oracle.select`.
        environment: As in :meth:`Oracle.select`.
        tuning: As in :meth:`Oracle.select`.
        machine: Machine whose figures are used. Default: known figures of machines with that ``device``.

    Returns:
        All candidates and the choice.

    Raises:
        ConfigError: Invalid ``dp_size``, or no class has the name.
    """
    info = as_device_info(device)
    shared = config.parallel.token_sharing is TokenSharing.ALL
    names = REDUCTIONS if shared else ALL2ALL_BACKENDS
    if all2all not in ("auto", *names):
        what = "ranks that have the same tokens" if shared else "tokens that cross ranks"
        raise ConfigError(
            f"all2all_backend {all2all!r} is unknown for {what}{did_you_mean(all2all, names)}; "
            f"expected auto, {', '.join(names)}"
        )
    if machine is None and info.is_gpu:
        machine = Machine.of_device(info.name)
    one = replace(config, num_local_experts=1)
    expert_bytes = sum(
        tensor.nbytes for _, tensor in example_weights(one, weight_key, activation_key, "meta").tensors()
    )
    found = []
    for name in names:
        cls = load_prepare_finalize(name)
        asked = replace(
            config,
            parallel=replace(config.parallel, all2all_backend=name),
            activation_format=cls.activation_format,
            max_num_tokens=config.max_num_tokens or max(tokens, 1),
        )
        selection = None
        try:
            selection = oracle.select(
                asked,
                weight_key=weight_key,
                activation_key=activation_key,
                moe_backend=moe_backend,
                device=info,
                environment=environment,
                tuning=tuning,
            )
            report = selection.report
        except (NoBackendError, BackendRefusedError) as error:
            report = error.report
        reasons = cls.unsupported_reasons(asked, None, info, environment)
        if cls.claims.one_domain and machine is not None and config.parallel.world_size > machine.domain:
            others = f"only {machine.domain} reach each other on {machine.name}"
            ranks = config.parallel.world_size
            reasons = [*reasons, f"writes into the memory of other GPUs: {others}, got {ranks} ranks"]
        if reasons:
            selection = None
        payload = None
        if selection is not None and cls.collective and cls.claims.quantizes:
            payload = selection.activation_key if Oracle.make_experts(selection).takes_quantized else None
        bits = 8 if activation_key is not None and activation_key.dtype.bits == 8 else 16
        cost = layer_cost(name, asked, tokens, machine, expert_bytes=expert_bytes, payload=payload, product_bits=bits)
        found.append(PrepareFinalizeCandidate(cls, tuple(reasons), report, selection, payload, cost))
    # Among equal candidates, prefer one that does not need the host.
    fitting = sorted((candidate for candidate in found if candidate.fits), key=lambda one: not one.cuda_graph)
    lines = (
        {}
        if shared or machine is None
        else {c.name: Line.of(c.name, c.report.config, machine, c.payload) for c in fitting}
    )
    if all2all == "auto":
        # Classes for ranks with the same tokens differ in their outputs; the first gives what is requested.
        chosen = next(iter(fitting), None) if shared else min(fitting, key=lambda c: c.seconds, default=None)
    else:
        chosen = next((candidate for candidate in fitting if candidate.name == all2all), None)
    known = {name: line for name, line in lines.items() if line is not None}
    return PrepareFinalizeSelection(tokens, all2all, tuple(found), chosen, machine, fastest(known))


def verdict(found: PrepareFinalizeSelection) -> str:
    """Return text such as "32 ranks (tp 4, ep 8, dp 32), 128 tokens each: alltoall with triton"."""
    chosen = found.chosen
    what = "no prepare/finalize fits" if chosen is None else f"{chosen.name} with {_backend(chosen)}"
    how = "" if found.requested == "auto" else f" (asked for {found.requested})"
    return f"{sizes(found)}: {what}{how}"


def sizes(found: PrepareFinalizeSelection) -> str:
    """Return text such as "32 ranks (tp 4, ep 8, dp 32), 128 tokens each"."""
    parallel = found.candidates[0].report.config.parallel
    over = f"tp {parallel.tp_size}, ep {parallel.ep_size}, dp {parallel.dp_size}"
    each = "each" if parallel.dp_size > 1 else "on all"
    return f"{parallel.world_size} ranks ({over}), {found.tokens} tokens {each}"


def lines(found: PrepareFinalizeSelection, *, verbose: bool) -> list[str]:
    """Return the verdict, a table of the classes, and reasons against those that do not fit.

    ``verbose`` adds every pair of class and backend with every reason.
    """
    rows = []
    for candidate in found.candidates:
        mark = "->" if candidate is found.chosen else "ok" if candidate.fits else "no"
        cost = candidate.cost
        sent = () if cost is None else (cost.dispatch_bytes, cost.combine_bytes)
        moved = [bytes_text(round(count)) for count in sent] or ["", ""]
        shown = [""] * 5
        if cost is not None and cost.times is not None:
            shown = [duration(seconds or 0.0) for seconds in (*cost.times, cost.seconds, cost.overlapped)]
        graph = ("yes" if candidate.cuda_graph else "no") if candidate.fits else ""
        rows.append([f"{mark} {candidate.name}", _backend(candidate), *moved, *shown, graph])
    times_header = ["experts", "latency", "transfer", "total", "overlapped"]
    text = table(["prepare/finalize", "backend", "dispatch", "combine", *times_header, "graph"], rows)
    result = [verdict(found), *(f"  {line}" for line in text.split("\n"))]
    if found.machine is None:
        result.append(
            f"  times        none without figures of the machine: --machine {', '.join(MACHINES)}, or a JSON file"
        )
    else:
        figures = f"{found.machine.name} ({found.machine.source})"
        result.append(f"  figures      {figures}; bytes and times are of one rank and one call, routing is uniform")
    if found.fastest:
        ranges = ", ".join(f"{name} from {tokens}" for tokens, name in found.fastest)
        result.append(f"  fastest      by tokens per rank: {ranges}")
    for candidate in found.candidates:
        result += _reasons(candidate, verbose=verbose)
    return result


def _backend(candidate: PrepareFinalizeCandidate) -> str:
    chosen = candidate.report.chosen
    return chosen.backend if candidate.fits and chosen is not None else "none"


def _reasons(candidate: PrepareFinalizeCandidate, *, verbose: bool) -> list[str]:
    if candidate.reasons and not verbose:
        return [f"  no {candidate.name}: {'; '.join(candidate.reasons)}"]
    pairs = [pair for pair in candidate.report.candidates if pair.takes_keys]
    if verbose:
        against = [f"; {'; '.join(candidate.reasons)}"] if candidate.reasons else []
        head = f"  {'ok' if candidate.fits else 'no'} {candidate.name}{''.join(against)}"
        return [head, *(_pair(candidate, pair) for pair in pairs)]
    if candidate.fits:
        return []
    closest = one_of_each(pairs)[:3]
    return [f"  no {candidate.name} with {pair.backend}: {'; '.join(pair.reasons)}" for pair in closest]


def _pair(candidate: PrepareFinalizeCandidate, pair: Candidate) -> str:
    if candidate.reasons or not pair.fits:
        why = pair.reasons or candidate.reasons
        return f"     no {pair.backend} [{pair.experts.__name__}]: {'; '.join(why)}"
    return f"     ok {pair.backend} [{pair.experts.__name__}]"
