"""The communication cost model, compared with and fitted to ``distributed.py`` results.

    python benchmarks/distributed_model.py RESULTS.json … [--machine FILE.json] [--within 15]
                                           [--document docs/results/several-gpus.json --commit COMMIT --date DATE]

Each point is the time of a layer: a rank's experts alone, as measured, plus communication from the model
(moe_core.parallel.distributed.cost). It is shown before and after the model's two parameters per kind of step are
fitted to all points of the files (2 and 4 ranks, for example). Deviations refer to the layer, those in parentheses to
communication alone. ``--machine`` writes the fitted parameters, as ``moe explain --machine`` takes them. ``--document``
writes the table of docs/performance.md and keeps its title and notes. The exit code is 1 if a fitted prediction
deviates by more than ``--within`` percent of the layer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distributed import SCHEMES
from moe_core import FusedMoEConfig, FusedMoEParallelConfig
from moe_core.parallel.distributed.cost import Kind, LayerCost, Machine, layer_cost


@dataclass(frozen=True)
class Point:
    """One measured time of a layer.

    Attributes:
        name: number of ranks, as text.
        all2all: all2all backend.
        config: configuration of the layer.
        tokens: tokens per rank.
        scheme: scheme of the weights.
        us: microseconds of the layer.
        alone_us: microseconds of a rank's experts alone.
        layer: name of the layer.
        bytes: traffic of the busiest rank.
    """

    name: str
    all2all: str
    config: FusedMoEConfig
    tokens: int
    scheme: str
    us: float
    alone_us: float
    layer: str = ""
    bytes: int = 0

    @property
    def over_us(self) -> float:
        """Microseconds of communication."""
        return self.us - self.alone_us

    def cost(self, machine: Machine) -> LayerCost:
        """Return the model's cost."""
        found = layer_cost(self.all2all, self.config, self.tokens, machine, payload=SCHEMES[self.scheme][2])
        if found is None:
            raise ValueError(f"{self.all2all}: no cost is known")
        return found

    def predicted(self, machine: Machine) -> float:
        """Return the predicted microseconds."""
        cost = self.cost(machine)
        _, latency, transfer = cost.times or (0.0, 0.0, 0.0)
        return self.alone_us + (latency + transfer) * 1e6


def points(data: dict[str, Any]) -> list[Point]:
    """Read the points of a file written by ``distributed.py --json``."""
    ranks = data["meta"]["ranks"]
    configs = {
        name: FusedMoEConfig(
            num_experts=layer["E"],
            top_k=layer["k"],
            hidden_size=layer["K"],
            intermediate_size=layer["N"],
            parallel=FusedMoEParallelConfig(ep_size=ranks, dp_size=ranks),
        )
        for name, layer in data["meta"]["layers"].items()
    }
    return [
        Point(
            f"{ranks} ranks",
            row["peer"],
            configs[row["layer"]],
            p["M"],
            row["scheme"],
            p["us"],
            p["alone_us"],
            row["layer"],
            p.get("bytes", 0),
        )
        for row in data["results"]
        for p in row["points"]
        if p.get("taken", row["peer"]) == row["peer"]
    ]


@dataclass(frozen=True)
class Sample:
    """Measured steps that were timed together.

    Attributes:
        kinds: kinds of the steps.
        latency: seconds of latency, and of other known terms.
        transfer: seconds of the transfers at full link bandwidth.
        seconds: measured seconds.
        calls: number of calls.
        far: whether any data went between domains.
    """

    kinds: tuple[str, ...]
    latency: float
    transfer: float
    seconds: float
    calls: int = 1
    far: bool = False

    @staticmethod
    def of(cost: LayerCost, machine: Machine, seconds: float) -> Sample:
        """Combine the steps of a layer with their measured time."""
        steps = (*cost.before, *cost.after)
        # With free calls and links of full efficiency, what remains of a step is known.
        ideal = replace(machine, kinds={kind: Kind(0.0, 1.0) for kind in machine.kinds})
        wires = [
            max(step.near_bytes / machine.near.bandwidth, step.far_bytes / machine.far.bandwidth) for step in steps
        ]
        known = sum(step.latency(ideal) + step.transfer(ideal) for step in steps) - sum(wires)
        kinds = tuple(step.kind for step in steps)
        return Sample(kinds, known, sum(wires), seconds, len(steps), any(step.far_bytes for step in steps))


def fitted(machine: Machine, found: list[Point], source: str) -> Machine:
    """Fit the machine to the points; points no slower than the experts alone are ignored."""
    slower = [p for p in found if p.us > p.alone_us]
    return fitted_to(machine, (Sample.of(p.cost(machine), machine, p.over_us * 1e-6) for p in slower), source)


def fitted_to(machine: Machine, samples: Iterable[Sample], source: str) -> Machine:
    """Return a machine with ``call`` and ``efficiency`` fitted to measured steps.

    The model is ``seconds = calls * call + latency + transfer / efficiency``, fitted by least squares of relative
    errors. Kinds that were timed together get the same values. A kind needs at least two samples of different sizes,
    otherwise it is unchanged. Values between domains are unchanged if no sample went there.

    Args:
        machine: the machine before.
        samples: the measurements.
        source: description of where they come from.

    Returns:
        The fitted machine.
    """
    together: dict[tuple[str, ...], list[Sample]] = {}
    for sample in samples:
        together.setdefault(tuple(sorted(set(sample.kinds))), []).append(sample)
    kinds = dict(machine.kinds)
    for names, mine in together.items():
        found = _least_squares(mine)
        if found is not None:
            far = any(sample.far for sample in mine)
            kinds |= {name: found if far else replace(found, far_efficiency=kinds[name].far) for name in names}
    return replace(machine, kinds=kinds, source=source)


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


def table(found: list[Point], machine: Machine) -> dict[str, Any]:
    """Build a document's table of layer times, and measured and predicted communication."""
    backends = list(dict.fromkeys(p.all2all for p in sorted(found, key=lambda p: p.us)))
    several = len({p.name for p in found}) > 1
    rows = []
    for name, layer, tokens in sorted(
        {(p.name, p.layer, p.tokens) for p in found}, key=lambda key: (key[0], key[1] != "top8", key[1], key[2])
    ):
        mine = {p.all2all: p for p in found if (p.name, p.layer, p.tokens) == (name, layer, tokens)}
        label = f"{name}, {layer}, {tokens}" if several else f"{layer}, {tokens}"
        cells = []
        for all2all in backends:
            p = mine.get(all2all)
            over = () if p is None else (p.over_us, p.predicted(machine) - p.alone_us)
            measured, model = (f"{us:.1f}" if us < 100 else f"{us:.0f}" for us in over) if over else ("", "")
            cells.append("–" if p is None else f"{p.us:.4g} (+{measured}, {model})")
        sent = [mine[one].bytes for one in ("alltoall", "allgather_reducescatter") if one in mine]
        ratio = f"{sent[0] / sent[1]:.2f}" if len(sent) == 2 and sent[1] else "–"
        rows.append([label, f"{next(iter(mine.values())).alone_us:.4g}", *cells, ratio])
    titles = [f"{name}, µs" for name in backends]
    first = "ranks, layer, tokens of each rank" if several else "layer, tokens of each rank"
    header = [first, "a rank's experts alone, µs", *titles, "bytes, all-to-all over all-gather"]
    return {"header": header, "rows": rows}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; prints a line per point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--machine", type=Path)
    parser.add_argument("--within", type=float, default=15.0)
    parser.add_argument("--document", type=Path)
    parser.add_argument("--commit")
    parser.add_argument("--date")
    options = parser.parse_args(arguments)
    files = [json.loads(path.read_text()) for path in options.results]
    before = Machine.of_device(files[0]["meta"]["gpu"])
    if before is None:
        print(f"no figures are known of {files[0]['meta']['gpu']}", file=sys.stderr)
        return 2
    found = [point for data in files for point in points(data)]
    after = fitted(before, found, f"measured on {files[0]['meta']['gpu']}; links by data sheets")
    worst = 0.0
    for p in found:
        first, then = (100 * (p.predicted(machine) / p.us - 1) for machine in (before, after))
        worst = max(worst, abs(then))
        part = 100 * ((p.predicted(after) - p.alone_us) / p.over_us - 1) if p.over_us > 0 else 0.0
        what = (
            f"{p.name}  {p.layer}  {p.scheme}  {p.all2all}  M {p.tokens}  {p.us:.1f} us, {p.over_us:.1f} over experts"
        )
        print(f"{what}  before {first:+.0f} %  fitted {then:+.1f} % ({part:+.0f} %)")
    for kind, numbers in after.kinds.items():
        print(f"{kind}: call {numbers.call * 1e6:.1f} us, {100 * numbers.efficiency:.0f} % of the links")
    print(f"largest deviation {worst:.1f} %")
    if options.machine is not None:
        options.machine.write_text(json.dumps(after.to_json(), indent=2) + "\n")
    if options.document is not None:
        document = json.loads(options.document.read_text())
        document["run"] |= {key: value for key in ("commit", "date") if (value := getattr(options, key)) is not None}
        text = json.dumps(document | table(found, after), indent=1, ensure_ascii=False)
        options.document.write_text(text + "\n")
    return int(worst > options.within)


if __name__ == "__main__":
    sys.exit(main())
