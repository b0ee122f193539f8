"""Documents: links lead somewhere, lines can be read, and tables of results say what was measured."""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import add_results
import moe_core as mc
import pytest
import results_document
import run_examples
from moe_core.cli.grammar import build

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "benchmarks/*.md", "docs/**/*.md", "packages/*/*.md", "examples/*/*.md")
    for path in ROOT.glob(pattern)
    if path.name != "introduction.md"  # a part of docs/performance.md, from where its links lead
)
SOURCES = sorted(path for path in ROOT.glob("packages/*/src/*") if path.is_dir())
CORE = ROOT / "packages" / "moe-core" / "src" / "moe_core"
#: the groups that core looks up: constants of its modules
ENTRY_POINTS = {
    group
    for path in ROOT.glob("packages/moe-core/src/**/*.py")
    for group in re.findall(r'GROUP = "(moe_core\.\w+)"', path.read_text(encoding="utf-8"))
}
#: what is told of an earlier day may name what is gone
CODE_DOCUMENTS = [path for path in DOCUMENTS if path.name not in ("CHANGELOG.md", "hardware.md")]
WRITTEN = [path for path in DOCUMENTS if path.name in ("backends.md", "performance.md")]


def anchors(path: Path) -> set[str]:
    """The fragments of a document's headings."""
    return {
        results_document.anchor(re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading))
        for heading in re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    }


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, fragment = link.partition("#")
        target = path.parent / name if name else path
        if not link.startswith("http") and not (target.exists() and (not fragment or fragment in anchors(target))):
            wrong.append(link)
    assert not wrong


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.name)
def test_written_documents_have_lines_that_can_be_read(path: Path) -> None:
    assert max(map(len, path.read_text(encoding="utf-8").splitlines())) <= 300


def test_mentioned_documents_are_there() -> None:
    """Comments send a reader to figures; the file must be there."""
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in (*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("benchmarks/*.py"))
        for name in re.findall(r"docs/[\w/-]+\.md", path.read_text(encoding="utf-8"))
        if not (ROOT / name).exists()
    }
    assert not missing


def modules(folder: Path) -> set[str]:
    """Names of the modules and packages in a folder that are not private."""
    names = {path.stem if path.suffix == ".py" else path.name for path in folder.iterdir()}
    return {name for name in names if not name.startswith("_") and name != "py.typed"}


def test_the_map_of_core_names_every_folder_once() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.partition("| folder of `moe_core` |")[2].partition("\n\n")[0]
    named = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)/?`", row.split("|")[1])]
    assert sorted(named) == sorted(path.name for path in CORE.iterdir() if (path / "__init__.py").exists())


def stale(text: str, folder: Path = ROOT) -> set[str]:
    """Paths, from ``folder`` or a package, and dotted names in backticks of which nothing is there."""
    paths = set(re.findall(r"`([\w/.-]+(?:/|\.py))`", text))
    found = {name for name in paths if not any((place / name).exists() for place in (folder, ROOT, *SOURCES))}
    for name in set(re.findall(r"`((?:moe_\w+)(?:\.\w+)+)`", text)) - ENTRY_POINTS:
        package, *parts = name.split(".")
        place = next((source for source in SOURCES if source.name == package), None)
        while place is not None and place.is_dir() and parts and parts[0] in modules(place):
            place /= parts.pop(0)
            place = place if place.is_dir() else place.with_suffix(".py")
        source = place / "__init__.py" if place is not None and place.is_dir() else place
        if source is None or (parts and not re.search(rf"\b{parts[0]}\b", source.read_text(encoding="utf-8"))):
            found.add(name)
    return found


@pytest.mark.parametrize("path", CODE_DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_code_that_documents_name_is_there(path: Path) -> None:
    assert not stale(path.read_text(encoding="utf-8"), path.parent)


def test_what_is_gone_is_found() -> None:
    there = "`kernels/device/wait.py` `docs/` `moe_core.kernels.launch.replay` `moe_core.selection.oracle.Oracle`"
    assert stale(there) == set()
    assert stale("`jit/gone.py`, `moe_core.gone`, `moe_core.selection.oracle.Gone`, `moe_gone.scheme`") == {
        "jit/gone.py",
        "moe_core.gone",
        "moe_core.selection.oracle.Gone",
        "moe_gone.scheme",
    }


def code(text: str) -> Iterator[str]:
    """Code in backticks, a line that goes on made one; then every line of shell blocks, without its comment."""
    for block in re.findall(r"^```(?:sh)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        yield from (line.partition(" #")[0] for line in block.splitlines())
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    yield from (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose))


def unknown_options(text: str) -> set[str]:
    """Options of ``moe`` that no command has, as "run --quantize"."""
    commands = next(a.choices for a in build()._actions if isinstance(a, argparse._SubParsersAction))
    found = set()
    for line in code(text):
        for name, rest in re.findall(r"(?:^|bin/|\s)(?:moe|-m moe_core) (\w+)\b(.*)", line):
            options = commands[name]._option_string_actions if name in commands else rest
            found |= {f"{name} {o}" for o in re.findall(r"(?<=\s)--[\w-]+", rest) if o not in options}
    return found


#: what documents call with keywords
CALLED = {name: getattr(mc, name) for name in mc.__all__ if callable(getattr(mc, name))} | {
    name: getattr(owner, name)
    for owner in (mc.FusedMoELayer, mc.FusedMoEKernel, mc.Oracle, mc.ParallelGroups)
    for name in vars(owner)
    if not name.startswith("_") and callable(getattr(owner, name))
}


def unknown_keywords(text: str) -> set[str]:
    """Keywords that a public function of core does not have, as "load_layer(quantize=)"."""
    found = set()
    for span in code(text):
        try:
            nodes = list(ast.walk(ast.parse(span.replace("…", "..."))))
        except SyntaxError:
            continue
        for call in nodes:
            if not isinstance(call, ast.Call):
                continue
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            parameters = inspect.signature(CALLED[name]).parameters if name in CALLED else {}
            if parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
                found |= {f"{name}({k.arg}=)" for k in call.keywords if k.arg and k.arg not in parameters}
    return found


@pytest.mark.parametrize("path", CODE_DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_options_and_keywords_that_documents_name_are_there(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert unknown_options(text) | unknown_keywords(text) == set()


def test_wrong_options_and_keywords_are_found() -> None:
    text = (
        "`moe run DIR --quantise\nNAME`, `load_layer(DIR, quantise=NAME)`\n\n```sh\nbin/moe bench --eq 4  # --no\n```\n"
    )
    assert unknown_options(text) == {"run --quantise", "bench --eq"}
    assert unknown_keywords(text) == {"load_layer(quantise=)"}
    assert unknown_options("`moe run DIR --tp 2`, `torchrun --nproc-per-node 2 -m moe_core bench --ep 4`") == set()
    assert unknown_keywords("`load_layer(DIR, layer=3)`, `other(quantize=1)`, `layer(x, adapter_ids=ids)`") == set()


@pytest.mark.parametrize(
    ("printed", "holds"), [("a 1\nb", True), ("a …\nb", True), ("…\nb", True), ("a 2\nb", False), ("a 1", False)]
)
def test_an_examples_output_is_what_stands_behind_it(tmp_path: Path, printed: str, holds: bool) -> None:
    path = tmp_path / "example.md"
    path.write_text(f"```python\nprint('a 1')\nprint('b')\n```\n\n```\n{printed}\n```\n\n```python\nprint('c')\n```\n")
    with contextlib.nullcontext() if holds else pytest.raises(ValueError, match=r"example.md:2:.*\na 1"):
        assert run_examples.run(path) == 2


# ----------------------------------------------------------------- results


def written(folder: Path, **changes: Any) -> Path:
    """A small run as a file."""
    run = {
        "title": "FP8, blocks",
        "run": {"date": "2026-11-21", "commit": "abc", "hardware": "a GPU", "software": "torch"},
        "unit": "µs",
        "implementations": {"moe": "ours", "peer": "Peer", "floor": "floor"},
        "results": [
            {"column": "a", "peer": "moe", "points": {"1": 10.0, "32": 20.0}},
            {"column": "a", "peer": "peer", "points": {"1": 20.0, "32": 10.0}},
            {"column": "b", "peer": "moe", "points": {"1": 10.0}},
            {"column": "b", "peer": "peer", "points": {"1": 80.0, "32": 10.0}},
            {"column": "b", "peer": "floor", "points": {"1": 5.0}},
        ],
        **changes,
    }
    path = folder / "fp8-run.json"
    path.write_text(add_results.dumped(run), encoding="utf-8")
    assert json.loads(path.read_text(encoding="utf-8")) == run
    return path


@pytest.mark.parametrize("path", results_document.timed_runs(), ids=lambda path: path.stem)
def test_committed_runs_name_benchmarks_that_are_there(path: Path) -> None:
    benchmark = results_document.load(path)["run"].get("benchmark")
    assert benchmark is None or (ROOT / benchmark).is_file()


def test_runs_on_hardware_state_what_ran_where() -> None:
    runs = json.loads(results_document.HARDWARE.read_text(encoding="utf-8"))["runs"]
    known = {"date", "area", "card", "commit", "what", "passed", "failed", "skipped", "notes"}
    assert runs
    assert all({"date", "area", "card", "commit", "what"} <= run.keys() <= known for run in runs)


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", results_document.RESULTS / "introduction.md"], ids=lambda p: p.name
)
def test_figures_in_prose_are_those_of_the_run(path: Path) -> None:
    *_, (_, cells, ratio, lowest, _, _) = results_document.load(results_document.RESULTS / "peers-summary.json")["rows"]
    text = path.read_text(encoding="utf-8").replace("**", "").replace("\n", " ").replace("  ", " ")
    assert f"{ratio} times as long as these" in text
    assert f"{lowest} times" in text
    assert "of all cells" in text or f"of {cells} cells" in text


def test_a_run_is_compared_cell_by_cell(tmp_path: Path) -> None:
    run = results_document.load(written(tmp_path))
    assert results_document.ratios(run, "peer") == {1: [2.0, 8.0], 32: [0.5]}
    assert results_document.overall(run, "peer") == (pytest.approx(2.0), 0.5)
    text = results_document.section(run)
    assert "| 32 | 20 / 10 | – / 10 |" in text  # the floor is no time of anybody's
    assert "| Peer | **2.00** | 0.50 | 4.00 | 0.50 |" in text
    assert "| floor | **0.50** | 0.50 | 0.50 | – |" in text
    assert "2026-11-21, commit abc; a GPU; torch." in text


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"implementations": {"moe": "ours"}}, "implementations"),
        ({"results": [{"column": "a", "peer": "moe", "points": {}}] * 2}, "stands twice"),
        ({"run": {"date": "2026-11-21", "commit": "abc", "software": ""}}, "hardware"),
        ({"titel": ""}, "titel"),
    ],
)
def test_a_run_that_leaves_something_open_is_refused(tmp_path: Path, changes: dict[str, Any], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        results_document.load(written(tmp_path, **changes))


def test_a_benchmarks_file_becomes_a_run(tmp_path: Path) -> None:
    """Names that a reader gave stay; times, versions and floors come from the benchmark."""
    point = {"M": 1, "us": 12.3456, "us_min": 12.0, "weight_bytes": 43.5e6, "io_bytes": 0, "flops": 1300e6}
    slow = point | {"M": 4096, "us": 15000.0, "flops": 26e9}
    failed = {"M": 8, "error": "out of memory"}
    case = {"shape": "a", "scheme": "fp8_block", "own": True}
    data = {
        "meta": {"started": "2026-12-01 10:00", "gpu": "H200", "python": "3.12.3", "versions": {"torch": "2.11.0"}},
        "results": [
            case | {"peer": "vllm_triton", "points": [point | {"us": 20.0}]},
            case | {"peer": "moe", "points": [point, failed, slow]},
            case | {"peer": "vllm_other", "points": [point]},
            {"key": "a/fp8_block/broken", "error": "died", "peer": "moe_broken", "shape": "a", "scheme": "fp8_block"},
        ],
    }
    old = results_document.load(written(tmp_path, notes=["old"]))
    run = add_results.added(data, old, "", "moe|triton", commit="def")
    assert run["title"] == "FP8, blocks"
    assert run["implementations"] == {"moe": "ours", "vllm_triton": "vllm triton", "floor": "floor"}
    assert run["run"] == {
        "date": "2026-12-01",
        "commit": "def",
        "hardware": "H200",
        "software": "Python 3.12.3, torch 2.11.0",
    }
    assert run["results"] == [
        {"column": "a", "peer": "moe", "points": {"1": 12.35, "4096": 15000.0}},
        {"column": "a", "peer": "vllm_triton", "points": {"1": 20.0}},
        {"column": "a", "peer": "floor", "points": {"1": 10.0, "4096": 20.0}},
    ]
    assert "notes" not in run
    slower = add_results.floor(slow | case | {"peer": "moe_w8a16"})
    assert slower == pytest.approx(26e9 / 790e6)  # 16-bit activations
    with pytest.raises(ValueError, match="'none'"):
        add_results.added(data, old, "", "none", commit="def")


SAID = {"date": "2026-12-01", "commit": "def", "hardware": "a CPU", "software": "torch"}


def test_a_list_of_times_needs_the_machine_and_the_day() -> None:
    data = [{"shape": "W8A8", "scheme": "cpu", "peer": "torch", "M": 1, "ms": 1.5}]
    assert add_results.added(data, {}, "CPU", "", **SAID)["run"] == SAID
    assert add_results.added(data, {"run": SAID}, "CPU", "", commit="123")["run"] == SAID | {"commit": "123"}
    with pytest.raises(ValueError, match="--hardware --software"):
        add_results.added(data, {}, "CPU", "", commit="def", date="2026-12-01")


def test_a_run_in_milliseconds_says_so() -> None:
    data = [{"shape": "W8A8", "scheme": "cpu", "peer": peer, "M": 1, "ms": 1.5} for peer in ("torch", "whole")]
    run = add_results.added(data, {}, "CPU", "", **SAID)
    assert run["unit"] == "milliseconds"
    assert run["results"][0] == {"column": "W8A8", "peer": "torch", "points": {"1": 1.5}}


def test_host_times_of_several_schemes_become_columns_of_one_run() -> None:
    data = [
        {"shape": "a", "scheme": scheme, "peer": peer, "M": 1, "us": us, "p10": 90.0}
        for scheme, ours in (("fp8_block", "moe_fp8"), ("mxfp4", "moe_mxfp4"))
        for peer, us in (("vllm", 100.0), (ours, 50.0), ("vllm_other", 80.0))
    ]
    names = {"moe_.*": "ours", "vllm.*": "default"}
    run = add_results.added(data, {"implementations": {"ours": "replay"}}, "Host time", "moe|vllm$", names, **SAID)
    assert run["implementations"] == {"ours": "replay", "default": "default"}
    assert {result["column"] for result in run["results"]} == {"a fp8_block", "a mxfp4"}
    assert results_document.ratios(run, "default") == {1: [2.0, 2.0]}
    with pytest.raises(ValueError, match="fp8_block"):
        add_results.added(data, {}, "Host time", "", names, **SAID)
