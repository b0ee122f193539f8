"""What the logs of compute-sanitizer in a folder say: python summary.py FOLDER REPORT"""

from __future__ import annotations

import collections
import re
import sys
from pathlib import Path

#: kernels for which racecheck reports false positives (docs/design/racecheck.md)
KNOWN = ("hopper_kernel", "words_kernel")
PLANTED = {"memcheck-planted", "memcheck-bounds", "racecheck-race", "synccheck-sync"}


def reports(text):
    """The messages of a log, each with the lines that belong to it."""
    found, lines = (
        [],
        [line.removeprefix("========= ").strip() for line in text.splitlines() if line.startswith("=====")],
    )
    for line in lines:
        if re.match(r"(Error|Warning): |Invalid |Barrier error|Program hit |Internal |Target |.*hazard.*access", line):
            found.append([line])
        elif found and re.match(r"(and|at |by thread|Address|Access|Divergent|in |in block)", line):
            found[-1].append(line)
    return found


def short(message):
    """The message without what differs from thread to thread."""
    text = " ".join(message)
    text = re.sub(r"by thread \([^)]*\) in block \([^)]*\)", "", text)
    text = re.sub(r"\+0x[0-9a-f]+|0x[0-9a-f]+", "", text)
    text = re.sub(r"Address.*?bytes[^A]*", "", text)
    return re.sub(r"\s+", " ", text).strip()


def main():
    folder, report = Path(sys.argv[1]), []
    rows, firsts, wrong = [], [], []
    wrong += [f"{name}: did not run" for name in sorted(PLANTED) if not (folder / f"{name}.log").exists()]
    for log in sorted(folder.glob("*.log")):
        name, text = log.stem, log.read_text(errors="replace")
        output = log.with_suffix(".out")
        output = output.read_text(errors="replace") if output.exists() else ""
        done = "DONE" in output or "has run" in output or name in PLANTED
        totals = re.findall(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)", text)
        total = sum(int(a or b) for a, b in totals) if totals else None
        said = reports(text)
        kinds = collections.Counter(map(short, said))
        state = "ended" if totals and done else "ENDED EARLY" if totals else "CUT OFF"
        rows.append((name, total, len(said), state, "PROBLEM" in output))
        hand_over = name.startswith("racecheck") and said and all(any(k in " ".join(m) for k in KNOWN) for m in said)
        if name in PLANTED:
            if not (total or said):
                wrong.append(f"{name}: the planted error was not found")
        else:
            if state != "ended":
                wrong.append(f"{name}: {state.lower()}, {len(said)} reports until then")
            if said or total:
                note = ", in the warp-specialized kernels only: see docs/design/racecheck.md" if hand_over else ""
                wrong.append(f"{name}: {total} errors, {len(said)} reports{note}")
        for kind, count in kinds.most_common(3 if name not in PLANTED else 0):
            firsts.append(f"{name} {count} x {kind[:170]}")
        for line in output.splitlines():
            if line.startswith(("PROBLEM", "Traceback")) or ("differ" in line and " 0 of others differ" not in line):
                wrong.append(f"{name}: {line[:180]}")
        report.append(f"##### {name}\n{output[-3000:]}\n{text[:60000]}\n")
    cells = {
        name: "cut off" if total is None else f"{total}{'' if state == 'ended' else ' early'}"
        for name, total, _, state, _ in rows
    }
    Path(sys.argv[2]).write_text("".join(report))
    tools = ("memcheck", "racecheck", "synccheck")
    print(f"{'errors of':10}", *(f"{tool:>10}" for tool in tools))
    for group in ("hopper", "words", "tiles", "ops", "gemv"):
        print(f"{group:10}", *(f"{cells.get(f'{tool}-{group}', 'not run'):>10}" for tool in tools))
    print(
        "planted errors (each must be found):",
        ", ".join(f"{name} {cells.get(name, 'not run')}" for name in sorted(PLANTED)),
    )
    print("reports by kind:", *firsts[:10], sep="\n  ")
    print("to look at:" if wrong else "nothing to look at", *wrong[:12], sep="\n  ")
    sys.stdout.flush()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
