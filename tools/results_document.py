"""Text of docs/performance.md: a table per run in docs/results, with computed ratios.

One file holds one run::

    {
     "title": "FP8, 128x128 blocks",
     "run": {"date": "2026-11-21", "commit": "447ce63", "hardware": "NVIDIA H200", "software": "torch 2.11.0, ...",
             "benchmark": "benchmarks/fp8_block.py"},
     "unit": "µs",
     "implementations": {"moe_fp8": "moe-fp8 triton", "vllm_triton": "vLLM Triton", "floor": "floor"},
     "results": [{"column": "mixtral-8x7b", "peer": "moe_fp8", "points": {"1": 97.2, "8": 312.6}}, ...],
     "notes": ["..."]
    }

``implementations`` gives the order of the numbers in a cell; the first one is compared with the others. "floor" is not
a measured time but a lower bound from bytes and operations. A run without a comparison has ``"header"`` and ``"rows"``
instead of ``implementations`` and ``results``. ``tools/add_results.py`` writes the files.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
FLOOR = "floor"
#: runs of the test suites on GPUs, without times; summarized in docs/hardware.md
HARDWARE = RESULTS / "hardware.json"
#: order of the document, by the first word of a file's name
ORDER = ("peers", "fp8", "int8", "wna16", "mxfp4", "engine", "several", "host", "load", "cpu", "before", "steps")
Run = dict[str, Any]


def load(path: Path) -> Run:
    """Load one run.

    Args:
        path: File of docs/results.

    Returns:
        Content of the file.

    Raises:
        ValueError: A field is missing, unknown or contradictory. The message names the file.
    """
    run: Run = json.loads(path.read_text(encoding="utf-8"))
    wanted = {"title", "run"} | ({"header", "rows"} if "rows" in run else {"unit", "implementations", "results"})
    if problem := wanted - run.keys() or run.keys() - wanted - {"notes"}:
        raise ValueError(f"{path}: missing or unknown: {', '.join(sorted(problem))}")
    if missing := {"date", "commit", "hardware", "software"} - run["run"].keys():
        raise ValueError(f"{path}: run says nothing of {', '.join(sorted(missing))}")
    seen: set[tuple[str, str]] = set()
    for result in run.get("results", []):
        place = result["column"], result["peer"]
        if result["peer"] not in run["implementations"] or place in seen:
            raise ValueError(f"{path}: {place} stands twice, or implementations do not name it")
        seen.add(place)
    return run


def ratios(run: Run, peer: str) -> dict[int, list[float]]:
    """Return times of a peer relative to the first implementation, for columns that have both.

    Args:
        run: The run.
        peer: Name of the implementation.

    Returns:
        Ratios of all columns, by number of tokens.
    """
    first = next(iter(run["implementations"]))
    points = {(r["column"], r["peer"]): r["points"] for r in run["results"]}
    found: dict[int, list[float]] = {}
    for (column, name), theirs in points.items():
        ours = points.get((column, first), {})
        if name == peer:
            for tokens in theirs.keys() & ours.keys():
                found.setdefault(int(tokens), []).append(theirs[tokens] / ours[tokens])
    return dict(sorted(found.items()))


def mean(values: list[float]) -> float:
    """Return the geometric mean.

    Args:
        values: Positive numbers.

    Returns:
        The mean.
    """
    return math.exp(sum(map(math.log, values)) / len(values))


def overall(run: Run, peer: str) -> tuple[float, float]:
    """Return the geometric mean and the lowest value of :func:`ratios`.

    Args:
        run: The run.
        peer: Name of the implementation.

    Returns:
        (mean, lowest).
    """
    cells = [ratio for found in ratios(run, peer).values() for ratio in found]
    return mean(cells), min(cells)


def number(value: float | None) -> str:
    """Format a time with four digits.

    Args:
        value: The time, or None.

    Returns:
        The text; a dash for None.
    """
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table with right-aligned numbers.

    Args:
        header: Cells of the header.
        rows: Cells of the rows.

    Returns:
        The table.
    """
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def times(run: Run) -> str:
    """Return a table of tokens by columns, whose cells have one number per implementation.

    Args:
        run: The run.

    Returns:
        Markdown text.
    """
    shown = {name: label for name, label in run["implementations"].items() if name != FLOOR}
    points = {(r["column"], r["peer"]): r["points"] for r in run["results"]}
    columns = list(dict.fromkeys(column for column, _ in points))
    tokens = sorted({int(m) for found in points.values() for m in found})
    rows = [
        [str(m), *(" / ".join(number(points.get((c, name), {}).get(str(m))) for name in shown) for c in columns)]
        for m in tokens
    ]
    return f"In {run['unit']}: {' / '.join(shown.values())}.\n\n" + table(["M", *columns], rows)


def comparison(run: Run) -> str:
    """Return a table that compares the first implementation with the others.

    Args:
        run: The run.

    Returns:
        Markdown text with ratios over all cells and by tokens; "" if there is one implementation.
    """
    first, *others = run["implementations"]
    if not others:
        return ""
    tokens = sorted({m for peer in others for m in ratios(run, peer)})
    rows = []
    for peer in others:
        found = ratios(run, peer)
        cells = [f"{mean(found[m]):.2f}" if m in found else "–" for m in tokens]
        all_cells, lowest = overall(run, peer)
        rows.append([run["implementations"][peer], f"**{all_cells:.2f}**", f"{lowest:.2f}", *cells])
    label = f"time relative to {run['implementations'][first]}"
    return "\n" + table([label, "mean", "lowest", *(f"M {m}" for m in tokens)], rows)


def section(run: Run) -> str:
    """Return the section of one run.

    Args:
        run: The run.

    Returns:
        Markdown text.
    """
    about = run["run"]
    text = f"\n## {run['title']}\n\n{about['date']}, commit {about['commit']}; {about['hardware']}; {about['software']}"
    text += f"; `{about['benchmark']}`.\n\n" if "benchmark" in about else ".\n\n"
    if "rows" in run:
        text += table(run["header"], [[v if isinstance(v, str) else number(v) for v in row] for row in run["rows"]])
    else:
        text += times(run) + comparison(run)
    return text + "".join(f"\n{note}\n" for note in run.get("notes", []))


def anchor(title: str) -> str:
    """Return the fragment that Markdown renderers give a heading.

    Args:
        title: The heading.

    Returns:
        The fragment, without "#".
    """
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "-_")


def summary(runs: list[Run]) -> str:
    """Return a table with one row per pair of implementations.

    Args:
        runs: The runs.

    Returns:
        Markdown text.
    """
    rows = []
    for run in runs:
        first, *others = run.get("implementations") or [""]
        for peer in others:
            if peer != FLOOR:
                means = [f"{value:.2f}" for value in overall(run, peer)]
                names = [run["implementations"][name] for name in (first, peer)]
                rows.append([f"[{run['title']}](#{anchor(run['title'])})", *names, *means])
    return table(["run", "ours", "compared with", "mean", "lowest"], rows)


def timed_runs() -> list[Path]:
    """Return the files of runs with times, in the document's order."""
    paths = [path for path in RESULTS.glob("*.json") if path != HARDWARE]
    return sorted(paths, key=lambda path: (ORDER.index(path.stem.split("-")[0]), path.stem))


def text() -> str:
    """Return the whole document."""
    runs = [load(path) for path in timed_runs()]
    introduction = (RESULTS / "introduction.md").read_text(encoding="utf-8")
    return introduction.replace("SUMMARY\n", summary(runs)) + "".join(map(section, runs))
