"""Add a benchmark's results to docs/results, the source of docs/performance.md.

    python tools/add_results.py RUN.json docs/results/NAME.json [--title TEXT] [--only REGEX] [--commit HASH]
                                [--rename REGEX=NAME] [--date DATE] [--hardware TEXT] [--software TEXT] [--read TB/S]

RUN.json is the output of the fused-MoE benchmark (``bench.py --out``), or a list of {shape, scheme, peer, M, us} (or
ms) from its ``host.py`` or the CPU scripts of ``benchmarks``. The date of such a list is today's unless it is given. An
existing file keeps its title, the names of its implementations, its benchmark, and everything that RUN.json does not
state. Its notes, which referred to the earlier figures, are printed and removed. Then run: ``nox -s docs -- --write``
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from results_document import FLOOR, ROOT, load

#: read bandwidth of an H200 in TB/s, and operations per microsecond that sm_90 reaches in 8 and in 16 bits
READ = 4.35
RATE_8 = 1300e6
RATE_16 = 790e6
SCHEMES_16 = ("bf16", "int4_g128", "mxfp4")


def rows(data: Any, pattern: str, names: dict[str, str]) -> list[dict[str, Any]]:
    """Return the measured times that match a pattern.

    Args:
        data: A benchmark's results.
        pattern: Regular expression to find in "shape/scheme/peer".
        names: New names of peers, by a regular expression that matches their whole name.

    Returns:
        Rows with shape, scheme, peer, M, us or ms, and the figures that a floor is computed from.
    """
    if isinstance(data, list):
        found = data
    else:
        found = [
            {**{name: result[name] for name in ("shape", "scheme", "peer")}, **point}
            for result in data["results"]
            for point in result.get("points", [])
            if "us" in point
        ]
    chosen = [row for row in found if re.search(pattern, "/".join((row["shape"], row["scheme"], row["peer"])))]
    return [
        {**row, "peer": next((name for regex, name in names.items() if re.fullmatch(regex, row["peer"])), row["peer"])}
        for row in chosen
    ]


def floor(row: dict[str, Any], read: float = READ) -> float | None:
    """Return the minimum time of a row from its bytes and operations.

    Args:
        row: A row of :func:`rows`.
        read: Read bandwidth of the device, in TB/s.

    Returns:
        Microseconds; None if the row lacks the figures.
    """
    if not {"weight_bytes", "io_bytes", "flops"} <= row.keys():
        return None
    in_16_bits = row["scheme"] in SCHEMES_16 or "w8a16" in row["peer"]
    operations = row["flops"] / (RATE_16 if in_16_bits else RATE_8)
    return float(max((row["weight_bytes"] + row["io_bytes"]) / (read * 1e6), operations))


def results(
    measured: list[dict[str, Any]], implementations: dict[str, str], read: float = READ
) -> list[dict[str, Any]]:
    """Group rows by column and implementation.

    Args:
        measured: Rows of :func:`rows`.
        implementations: Labels of the implementations, in the order of the document.
        read: Read bandwidth of the device, in TB/s.

    Returns:
        Results in the implementations' order, with floors last.

    Raises:
        ValueError: An implementation has two times for one cell.
    """
    several = len({row["scheme"] for row in measured}) > 1
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in measured:
        column = f"{row['shape']} {row['scheme']}" if several else row["shape"]
        times = found.setdefault((column, row["peer"]), {})
        if str(row["M"]) in times:
            raise ValueError(f"{row['peer']} has two times for {column} at M = {row['M']}: choose with --only")
        times[str(row["M"])] = round(row["us"] if "us" in row else row["ms"], 2)
        least = floor(row, read)
        if least is not None:
            found.setdefault((column, FLOOR), {})[str(row["M"])] = round(least, 2)
    order = [*implementations, FLOOR]
    columns = list(dict.fromkeys(column for column, _ in found))
    places = sorted(found, key=lambda place: (columns.index(place[0]), order.index(place[1])))
    return [{"column": column, "peer": peer, "points": found[column, peer]} for column, peer in places]


def software(meta: dict[str, Any]) -> str:
    """Return the software versions that a run's file states.

    Args:
        meta: Metadata of the run.

    Returns:
        Names and versions, separated by commas.
    """
    versions = {"Python": meta.get("python", ""), **meta.get("versions", {})}
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)


def head() -> str:
    """Return the checked-out commit, with "+" if files differ from it."""
    ask = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()


def dumped(run: dict[str, Any]) -> str:
    """Return JSON with one line per result, row and note.

    Args:
        run: Content of a file of docs/results.

    Returns:
        The JSON text.
    """
    lines = []
    for name, value in run.items():
        if isinstance(value, list):
            inner = ",\n".join("  " + json.dumps(item, ensure_ascii=False) for item in value)
            lines.append(f" {json.dumps(name)}: [\n{inner}\n ]")
        else:
            lines.append(f" {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def added(
    data: Any,
    old: dict[str, Any],
    title: str,
    pattern: str,
    names: dict[str, str] | None = None,
    *,
    read: float = READ,
    **given: str,
) -> dict[str, Any]:
    """Convert a benchmark's results to the content of a file of docs/results.

    Args:
        data: A benchmark's results.
        old: Previous content of the file, or {}.
        title: Title; "" keeps the previous one.
        pattern: Regular expression to find in "shape/scheme/peer".
        names: New names of peers, by a regular expression that matches their whole name.
        read: Read bandwidth of the device for the floors, in TB/s.
        **given: commit, date, hardware or software. They take precedence over ``data``, which takes precedence over
            ``old``.

    Returns:
        The content of the file.

    Raises:
        ValueError: Nothing was measured, or a field of the run is not stated anywhere.
    """
    measured = rows(data, pattern, names or {})
    if not measured:
        raise ValueError(f"no implementation with a time matches {pattern!r}")
    meta = {} if isinstance(data, list) else data["meta"]
    peers = dict.fromkeys(row["peer"] for row in measured)
    known = {name: label for name, label in old.get("implementations", {}).items() if name in peers}
    # Own implementations come first: the first one is compared with the others.
    new = sorted(peers.keys() - known.keys(), key=lambda name: (not name.startswith(("moe", "torch")), name))
    implementations = known | {name: name.replace("_", " ") for name in new}
    found = results(measured, implementations, read)
    if any(result["peer"] == FLOOR for result in found):
        implementations[FLOOR] = FLOOR
    before = old.get("run", {})
    found_out = {"date": meta.get("started", "")[:10], "hardware": meta.get("gpu", ""), "software": software(meta)}
    run = {
        name: given.get(name) or found_out.get(name) or before.get(name)
        for name in ("date", "commit", "hardware", "software")
    }
    if missing := [name for name, value in run.items() if not value]:
        raise ValueError(f"the benchmark's file says nothing of {', '.join(missing)}: give --{' --'.join(missing)}")
    if "benchmark" in before:
        run["benchmark"] = before["benchmark"]
    return {
        "title": title or old["title"],
        "run": run,
        "unit": "milliseconds" if "ms" in measured[0] else "µs",
        "implementations": implementations,
        "results": found,
    }


def main() -> int:
    """Write the file and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--title", default="")
    parser.add_argument("--only", default="", help='regular expression on "shape/scheme/peer"')
    parser.add_argument(
        "--rename", action="append", default=[], metavar="REGEX=NAME", help="one name for the peers of several schemes"
    )
    parser.add_argument("--commit", default="", help="what was measured, if not what is checked out")
    for name in ("date", "hardware", "software"):
        parser.add_argument(f"--{name}", default="", help="where the benchmark's file does not say it")
    parser.add_argument("--read", type=float, default=READ, help="what the device reads, TB/s (%(default)s, an H200)")
    arguments = parser.parse_args()
    old = load(arguments.target) if arguments.target.exists() else {}
    if not old and not arguments.title:
        parser.error(f"{arguments.target} is new: it needs a --title")
    data = json.loads(arguments.source.read_text(encoding="utf-8"))
    given = {name: getattr(arguments, name) for name in ("commit", "date", "hardware", "software")}
    given["commit"] = given["commit"] or head()
    if isinstance(data, list) and not given["date"]:
        given["date"] = datetime.date.today().isoformat()
    try:
        names = dict(pair.rsplit("=", 1) for pair in arguments.rename)
        new = added(data, old, arguments.title, arguments.only, names, read=arguments.read, **given)
    except ValueError as error:
        parser.error(str(error))
    arguments.target.write_text(dumped(new), encoding="utf-8")
    for note in old.get("notes", []):
        print(f"left out: {note}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
