"""Text report on a layer's prepare/finalize classes over several ranks, with backends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_core.cli._output import bytes_text, duration, table
from moe_core.parallel.distributed.machine import MACHINES
from moe_core.selection.report import one_of_each

if TYPE_CHECKING:
    from moe_core.selection.prepare_finalize_choice import PrepareFinalizeCandidate, PrepareFinalizeSelection
    from moe_core.selection.report import Candidate


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
        times = [] if cost is None else [cost.compute, cost.latency, cost.transfer, cost.seconds, cost.overlapped]
        shown = ["" if seconds is None else duration(seconds) for seconds in times]
        graph = "yes" if candidate.cuda_graph else "no"
        rows.append(
            [
                f"{mark} {candidate.name}",
                _backend(candidate),
                *moved,
                *(shown + [""] * 5)[:5],
                graph if candidate.fits else "",
            ]
        )
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
