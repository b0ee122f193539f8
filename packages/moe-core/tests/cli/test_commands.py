"""explain, backends, doctor, quickstart, bench, and what they share."""

from __future__ import annotations

import errno
import importlib.metadata
import itertools
import json
import os
import re
import resource
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from moe_core import CheckpointError, ConfigError, FusedMoEConfig, Requirement, Verified, __version__
from moe_core._support.atomic_write import write_whole
from moe_core.checkpoint import Checkpoint, read_layer
from moe_core.cli import _machine, _output, _picture
from moe_core.cli._layers import random_call
from moe_core.cli._output import locked, written_folder
from moe_core.cli.commands import doctor
from moe_core.cli.commands import quickstart as quickstart_command
from moe_core.cli.commands.backends import describe, details, orders
from moe_core.cli.commands.doctor import INTEGRATION_GROUP
from moe_core.cli.grammar import COMMANDS
from moe_core.plugins import entry_points
from moe_core.selection.registry import registry
from moe_core.spec.device import DeviceInfo
from moe_core_checkpoints import write_quickstart
from moe_core_toys import GpuToyExperts, toy_oracle

SHAPE = ("--scheme", "plain", "--shape", "8,2,64,32")


# ------------------------------------------------------------------ explain


def test_explain_a_checkpoint(moe: Any, folder: Path) -> None:
    result = moe("explain", folder, "--device", "h200")
    assert result.code == 0
    assert "layer 1 (model.layers.1.mlp.experts), plain 16-bit" in result.out
    assert "plain on h200 (sm90): gpu" in result.out
    data = moe("explain", folder, "--layer", 2, "--device", "cpu", "--json").data
    assert (data["layer"], data["chosen"], data["device"]) == (2, "plain", "cpu")
    assert data["candidates"][0]["reasons"] == ["needs sm90 or newer, device is cpu"]


def test_explain_a_shape(moe: Any) -> None:
    data = moe("explain", *SHAPE, "--device", "sm90", "--activation", "relu2_no_mul", "--json").data
    assert (data["num_experts"], data["top_k"], data["hidden_size"], data["intermediate_size"]) == (8, 2, 64, 32)
    assert (data["activation"], data["chosen"]) == ("relu2_no_mul", "gpu")
    assert data["weight_key"] is None


def test_explain_where_nothing_fits(moe: Any) -> None:
    result = moe("explain", *SHAPE, "--weight-key", "kFp8Static128BlockSym", "--activation-key", "none", "--json")
    assert result.code == 2
    assert result.data["chosen"] is None
    assert all(candidate["reasons"] for candidate in result.data["candidates"])
    assert result.err == "moe explain: no backend fits; the report lists the reasons\n"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ((), ("give a checkpoint folder, or --scheme and --shape E,k,K,N",)),
        (("--scheme", "plain", "--shape", "8,2"), ("argument --shape: ", "'8,2'")),
        (("--scheme", "plain", "--shape", "8,2,x,4"), ("argument --shape: ", "'x'")),
        (("--scheme", "plain", "--shape", f"8,2,{10**23},4"), ("argument --shape: expected 16777216 or less",)),
        (("--scheme", "plain", "--shape", "2,8,64,32"), ("top_k 8 is larger than num_experts 2",)),
        (("--scheme", "none", "--shape", "8,2,64,32"), ("scheme 'none' is not installed (installed: plain)",)),
        (("--scheme", "mxfp4", "--shape", "8,2,64,32"), ("add it with: pip install moe-mxfp4",)),
        ((*SHAPE, "--device", "sm12345"), ("unknown device 'sm12345'", "sm90")),
        ((*SHAPE, "--weight-key", "kMxfp8Statik"), ("unknown quant key 'kMxfp8Statik'; did you mean 'kMxfp8Static'?",)),
        ((*SHAPE, "--activation", "silo"), ("unknown activation 'silo'; did you mean 'silu'?",)),
    ],
)
def test_explain_refuses(moe: Any, arguments: tuple[str, ...], parts: tuple[str, ...]) -> None:
    moe.refuses("explain", *arguments, parts=parts)


# ------------------------------------------------------------------ backends


def test_backends(moe: Any) -> None:
    out = moe("backends").out
    assert "sm80  sm89  sm90  sm100  sm120  gfx942  gfx950  cpu" in out
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.startswith("  ")}
    assert rows == {
        "gpu": ["-", "-", "yes", "yes", "yes", "-", "-", "-"],
        "plain": ["yes", "yes", "yes", "yes", "yes", "yes", "yes", "yes"],
    }
    assert max(map(len, out.splitlines())) <= 80
    data = moe("backends", "--json").data
    assert data["devices"]["plain"]["gpu"]["sm90"] == "claimed"
    assert [row["experts"].partition(":")[2] for row in data["backends"]] == [
        "GpuToyExperts",
        "ToyExperts",
        "BatchedToyExperts",
    ]
    assert data["backends"][2]["formats"] == ["batched"]
    assert moe("backends", "--scheme", "plain", "--json").data == data
    moe.refuses("backends", "--scheme", "fp8", parts=("scheme 'fp8' is not installed", "pip install moe-fp8"))


def test_backends_in_another_order_on_some_devices() -> None:
    def reversed_on_hopper(table: Any, device: DeviceInfo, *_: object) -> Any:
        return table[::-1] if device.arch == "sm90" else table

    assert orders(toy_oracle()) == {"default": ["gpu", "plain"]}
    oracle = toy_oracle(order=reversed_on_hopper)
    assert orders(oracle) == {"default": ["gpu", "plain"], "sm90": ["plain", "gpu"]}
    # a scheme that does not work is told by what is selected of it
    assert orders(toy_oracle(order=lambda *_: 1 / 0)) == {"default": ["gpu", "plain"]}


def test_backends_in_full(moe: Any) -> None:
    for arguments in (("-v",), ("--backend", "gpu")):
        out = moe("backends", *arguments).out
        assert "plain gpu: GpuToyExperts (modular)" in out
        assert "devices      sm90 or newer" in out
        assert "keys         16-bit x 16-bit\n  verified on  nothing yet" in out
        assert "activations  all gated, all without a gate" in out
    assert "plain plain" in moe("backends", "-v").out
    assert "plain plain" not in moe("backends", "--backend", "gpu").out
    moe.refuses("backends", "--backend", "plane", parts=("did you mean 'plain'?", "known: gpu, plain"))
    parts = ("plain has no backend 'plane'; did you mean 'plain'?; known: gpu, plain",)
    moe.refuses("backends", "--scheme", "plain", "--backend", "plane", parts=parts)


def test_backends_say_where_they_were_tested(moe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    claims = replace(
        GpuToyExperts.claims, verified_on=("NVIDIA H200 (sm90)", Verified("MI355X (gfx950)", ((None, None),)))
    )
    monkeypatch.setattr(GpuToyExperts, "claims", claims)
    described = describe("plain", "gpu", "", GpuToyExperts)
    assert dict(details(described))["verified on"] == "NVIDIA H200 (sm90); MI355X (gfx950) for 16-bit x 16-bit"
    # claims decide: gfx950 is not among the devices
    assert ["gpu", "-", "-", "run", "yes", "yes", "-", "-", "-"] in [
        x.split() for x in moe("backends").out.splitlines()
    ]
    monkeypatch.setattr(GpuToyExperts, "claims", replace(claims, requires=(Requirement("nothing_here", "nothing"),)))
    assert "  gpu* " in moe("backends").out


def test_backends_without_schemes(moe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: ())
    registry.cache_clear()
    result = moe("backends")
    assert result.code == 0
    assert "no scheme is installed; add one, e.g.: pip install moe-fp8" in result.out
    moe.refuses("quickstart", parts=("no scheme is installed", "pip install moe-fp8"))


# ------------------------------------------------------------------ doctor


def test_doctor(moe: Any) -> None:
    result = moe("doctor", "--json")
    assert result.code == 0
    data = result.data
    assert data["versions"]["torch"] == importlib.metadata.version("torch")
    assert data["versions"]["moe-core"] == __version__
    assert data["devices"][-1]["device"] == "cpu"
    assert [scheme["scheme"] for scheme in data["schemes"]] == ["plain"]
    assert {"moe-fp8", "moe-mxfp4"} <= {item["what"] for item in data["missing"]}
    assert all(item["command"] for item in data["missing"])
    out = moe("doctor").out
    assert "backends: gpu, plain" in out


def test_doctors_columns_make_room_for_long_names(moe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PACKAGES", (*doctor.PACKAGES, "a-package-with-a-long-name"))
    out = moe("doctor").out.splitlines()
    assert "  a-package-with-a-long-name -" in out
    assert f"  {'torch':<26} {importlib.metadata.version('torch')}" in out


def test_doctor_asks_integrations(moe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they say is shown; one that fails is named, and keeps nobody else from speaking."""
    module = types.ModuleType("some_integrations")
    module.works = lambda: ["on", "fp8: triton"]  # type: ignore[attr-defined]
    module.fails = lambda: 1 / 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_integrations", module)
    points = [
        importlib.metadata.EntryPoint(name, f"some_integrations:{name}", INTEGRATION_GROUP)
        for name in ("fails", "lacks", "works")
    ]
    monkeypatch.setattr(entry_points, "installed", lambda group: points if group == INTEGRATION_GROUP else [])
    result = moe("doctor", "--json")
    assert result.code == 1
    assert result.data["integrations"] == {"works": ["on", "fp8: triton"]}
    fails, lacks = result.data["faults"]
    assert "integration 'fails'" in fails
    assert "ZeroDivisionError" in fails
    assert "integration 'lacks'" in lacks
    assert "integrations\n  works              on\n                     fp8: triton\n" in moe("doctor").out


def test_doctor_names_a_library_once(moe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many schemes need it, each through an extra of its own; one command adds it to all of them."""
    needs = (
        Requirement("nowhere", "no-lib", "1.0", "moe-b[no-lib]"),
        Requirement("nowhere", "no-lib", "1.0", "moe-a[no-lib]"),
    )
    monkeypatch.setattr(GpuToyExperts, "claims", replace(GpuToyExperts.claims, requires=needs))
    (found,) = (item for item in moe("doctor", "--json").data["missing"] if item["what"] == "no-lib")
    assert found["why"] == "needs no-lib, which is not installed"
    assert found["command"] == "pip install 'moe-a[no-lib]' 'moe-b[no-lib]'"


def test_packages_that_bring_no_kernels(moe: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installing once more what is installed would end in the same error."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1.0")
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "gptq"}}
    (folder / "config.json").write_text(json.dumps(config))
    parts = ("moe-wna16 0.1.0 is, but brings no kernels yet", "a newer one may: pip install --upgrade moe-wna16")
    moe.refuses("run", folder, parts=parts)
    moe.refuses("explain", folder, parts=parts)
    moe.refuses("explain", "--scheme", "wna16", "--shape", "8,2,64,32", parts=parts)
    moe.refuses("quickstart", "--scheme", "wna16", parts=parts)
    found = {item["what"]: item for item in moe("doctor", "--json").data["missing"]}
    assert found["moe-wna16"]["why"] == "0.1.0 is installed, but brings no kernels yet; a newer one may"
    assert found["moe-wna16"]["command"] == "pip install --upgrade moe-wna16"


EXITING = """
import sys
print("hello from a plug-in")
sys.exit(0)
"""

BROKEN = """
from moe_core import Placement
from moe_core_toys import ToyExperts

class Claiming(ToyExperts):
    placement = Placement(before=("nobody",))

    @classmethod
    def extra_reasons(cls, *request):
        return 1 / 0
"""


@pytest.fixture
def with_broken(moe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Beside the plain scheme: a scheme that exits at import, and a backend whose claims fail."""
    (tmp_path / "moe_exiting.py").write_text(EXITING)
    (tmp_path / "moe_claiming.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(str(tmp_path))
    plain = importlib.metadata.entry_points
    added = {
        "moe_core.schemes": importlib.metadata.EntryPoint("exiting", "moe_exiting:SCHEME", "moe_core.schemes"),
        "moe_core.backends": importlib.metadata.EntryPoint("plain.mine", "moe_claiming:Claiming", "moe_core.backends"),
    }

    def entry_points(*, group: str) -> list[importlib.metadata.EntryPoint]:
        return [*plain(group=group), *([added[group]] if group in added else [])]

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    registry.cache_clear()
    yield moe
    for name in ("moe_exiting", "moe_claiming"):
        sys.modules.pop(name, None)


def test_commands_go_on_beside_broken_plugins(with_broken: Any, folder: Path) -> None:
    result = with_broken("explain", str(folder), "--device", "cpu", "--json")
    assert result.code == 0
    assert result.data["chosen"] == "plain"
    # what it prints is not part of the result
    assert "hello from a plug-in" not in result.out
    assert "hello from a plug-in" in result.err
    assert "moe explain: warning: scheme 'exiting' of " in result.err
    assert "moe_exiting:SCHEME cannot be loaded: SystemExit: 0" in result.err
    (left_out,) = result.data["left_out"]
    assert "the claims of Claiming fail: ZeroDivisionError" in left_out["reason"]
    (note,) = result.data["notes"]
    assert "names 'nobody'" in note
    result = with_broken("backends")
    assert result.code == 0
    assert "plain" in result.out


def test_doctor_names_faults_of_imports_and_claims_and_places(with_broken: Any) -> None:
    result = with_broken("doctor", "--json")
    assert result.code == 1
    exiting, claiming = result.data["faults"]
    assert "SystemExit: 0" in exiting
    assert "the claims of Claiming fail: ZeroDivisionError" in claiming
    assert "'nobody'" in result.data["notes"][0]
    assert [scheme["scheme"] for scheme in result.data["schemes"]] == ["plain"]
    text = with_broken("doctor").out
    assert "faults\n  scheme 'exiting'" in text
    assert "notes\n  backend 'mine'" in text


def test_doctor_names_what_is_broken(moe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*, group: str) -> tuple[importlib.metadata.EntryPoint, ...]:
        if group != "moe_core.schemes":
            return ()
        return (importlib.metadata.EntryPoint("lost", "moe_no_such_module:SCHEME", group),)

    monkeypatch.setattr(importlib.metadata, "entry_points", broken)
    registry.cache_clear()
    result = moe("doctor", "--json")
    assert result.code == 1
    assert "lost" in result.data["faults"][0]
    assert "moe_no_such_module" in result.data["faults"][0]


# ------------------------------------------------------------------ quickstart


def test_quickstart(moe: Any) -> None:
    result = moe("quickstart")
    assert (result.code, result.err) == (0, "")
    for part in (
        "1. wrote a checkpoint",
        "model.safetensors.index.json",
        "plain on cpu: plain",
        "float64 reference",
        "OK in",
    ):
        assert part in result.out


def test_quickstart_keeps_what_it_is_told_to(moe: Any, tmp_path: Path) -> None:
    kept = tmp_path / "a" / "b"
    data = moe("quickstart", "--keep", kept, "--tokens", 3, "--json").data
    assert (data["passed"], data["checkpoint"], data["tokens"]) == (True, str(kept), 3)
    assert 0 < data["error"] < data["tolerance"]
    assert sorted(p.name for p in kept.iterdir()) == data["files"]
    assert read_layer(Checkpoint.open(kept)).scheme == "plain"
    moe.refuses("quickstart", "--keep", kept, parts=("expected a new or an empty folder",))


def test_quickstart_says_what_comes_next(moe: Any, tmp_path: Path) -> None:
    """With the folder that was kept, so that the line can be run; without one it says what DIR stands for."""
    kept = tmp_path / "two words"
    assert f"\nnext: moe run '{kept}', moe explain '{kept}' --device h200, " in moe("quickstart", "--keep", kept).out
    assert "\nnext: moe run DIR, " in moe("quickstart").out
    assert moe("quickstart").out.endswith("\nDIR: a checkpoint of yours, or what moe quickstart --keep DIR writes\n")


def test_quickstart_leaves_nothing(moe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert moe("quickstart").code == 0
    moe.refuses("quickstart", "--backend", "gpu", parts=("needs sm90 or newer",))
    assert not list(tmp_path.iterdir())


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may have more than 3 kB: writing fails in its midst, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("kept", ["new", "empty"])
def test_quickstart_that_is_not_written_leaves_nothing(moe: Any, tmp_path: Path, small_files: None, kept: str) -> None:
    folder = tmp_path / "a"
    if kept == "empty":
        folder.mkdir()
    moe.refuses("quickstart", "--keep", folder, parts=(f"{folder} can't be written: ", "File too large"))
    assert [*tmp_path.rglob("*")] == ([folder] if kept == "empty" else [])


def test_output_that_is_not_written_leaves_nothing(moe: Any, folder: Path, tmp_path: Path, small_files: None) -> None:
    out = tmp_path / "o.safetensors"
    moe.refuses("run", folder, "--tokens", 1000, "--output", out, parts=(f"{out} can't be written: File too large",))
    assert [*tmp_path.iterdir()] == [folder]


def test_signals_leave_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come as KeyboardInterrupt, at any point."""
    with pytest.raises(KeyboardInterrupt), written_folder(tmp_path / "a"):
        (tmp_path / "a" / "model.safetensors").touch()
        raise KeyboardInterrupt

    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "o.safetensors", b"content")
    assert not [*tmp_path.iterdir()]


def test_writers_with_the_same_process_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in two containers that share a folder: the last one's content stands there, whole."""
    path, fsync, others = tmp_path / "o.json", os.fsync, [b"another"]

    def another_comes_first(descriptor: int) -> None:
        fsync(descriptor)
        while others:
            write_whole(path, others.pop())

    monkeypatch.setattr(os, "fsync", another_comes_first)
    write_whole(path, b"content")
    assert path.read_bytes() == b"content"
    assert [*tmp_path.iterdir()] == [path]


def test_what_is_locked_waits_for_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "p.json"

    def one_more() -> None:
        with locked(path):
            count = int(path.read_text())
            time.sleep(1e-3)
            write_whole(path, str(count + 1).encode())

    path.write_text("0")
    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(one_more) for _ in range(40)]:
            done.result()
    assert path.read_text() == "40"


def test_without_locks_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("filelock.FileLock.acquire", refuses)
    with locked(tmp_path / "p.json"):
        write_whole(tmp_path / "p.json", b"content")
    assert [*tmp_path.iterdir()] == [tmp_path / "p.json"]


def test_a_lock_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"p\.json\.lock"), locked(tmp_path / "no/p.json"):
        pass


def test_quickstart_outside_the_tolerance(moe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Off:
        """A layer whose result is 1 % off."""

        def __init__(self, layer: Any) -> None:
            self.layer = layer

        def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            result: torch.Tensor = self.layer(*args, **kwargs) * 1.01
            return result

        def __getattr__(self, name: str) -> Any:
            return getattr(self.layer, name)

    import moe_core.layer.loading as module

    original = module.load_requested
    monkeypatch.setattr(module, "load_requested", lambda *args, **kwargs: Off(original(*args, **kwargs)))
    result = moe("quickstart")
    assert result.code == 1
    assert "OUTSIDE the tolerance" in result.out
    assert "FAILED in" in result.out


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--tokens", "0"), "argument --tokens: expected 1 or more"),
        (("--tokens", str(10**23)), f"argument --tokens: expected 1099511627776 or less, got '{10**23}'"),
        (("--scheme", "wna16"), "pip install moe-wna16"),
        (("--device", "tpu"), "--device tpu"),
    ],
)
def test_quickstart_refuses(moe: Any, arguments: tuple[str, ...], part: str) -> None:
    moe.refuses("quickstart", *arguments, parts=(part,))


# ------------------------------------------------------------------ bench


@pytest.fixture
def known_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is not measured: 1 GB/s and 1 G operations/s."""
    limits = _machine.Limits(1e9, 1e9, "float32")
    monkeypatch.setattr(_machine, "measure_limits", lambda *_: limits)


def test_bench(moe: Any, tmp_path: Path, known_limits: None) -> None:
    file = tmp_path / "b.json"
    result = moe("bench", *SHAPE, "--tokens", "1,4", "--budget", "0.01", "--output", file)
    assert result.code == 0
    header, _, *rows = result.out.splitlines()[3:]
    assert header.split() == ["tokens", "experts", "floor", "backend", "time", "spread", "time/floor", "calls"]
    assert [row.split()[0] for row in rows] == ["1", "4"]
    assert all(re.search(r"-\d+/\+\d+ %", row) for row in rows)
    assert max(map(len, result.out.splitlines()[3:])) <= 80
    data = json.loads(file.read_text())
    assert [(r["backend"], r["tokens"]) for r in data["results"]] == [("plain", 1), ("plain", 4)]
    first = data["results"][0]
    assert first["active_experts"] == 2.0
    # one token, two experts: bf16 matrices of 2 x 32 x 64 and 64 x 32, x in and out; three products of 64 x 32 each
    moved = 2 * (2 * 32 * 64 + 64 * 32) * 2 + 2 * 64 * 2
    assert first["floor_seconds"] == pytest.approx(max(moved, 2 * 2 * 3 * 64 * 32) / 1e9)
    assert first["time_over_floor"] == pytest.approx(first["seconds"] / first["floor_seconds"])
    low, high = first["seconds_p10_p90"]
    assert 0 < low <= first["seconds"] <= high
    assert first["calls"] >= 5


def test_bench_skewed_routing(moe: Any, tmp_path: Path, known_limits: None) -> None:
    file = tmp_path / "uniform.json"
    arguments = ("bench", *SHAPE, "--tokens", "1", "--budget", "0.01")
    assert moe(*arguments, "--output", file).code == 0
    skewed = moe(*arguments, "--skew", "20", "--json").data
    assert skewed["skew"] == 20.0
    assert "routing skewed by 20" in moe(*arguments, "--skew", "20").out
    moe.refuses(*arguments, "--skew", "1", "--compare", file, parts=("skew is 0.0 there, 1.0 here",))
    # written before there was such a thing
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "skew"}))
    assert moe(*arguments, "--compare", file).code == 0


def test_skewed_calls_go_to_few_experts() -> None:
    config = FusedMoEConfig(num_experts=16, top_k=2, hidden_size=8, intermediate_size=8)
    _, weights, uniform = random_call(config, 200, torch.device("cpu"), 3)
    _, skewed_weights, skewed = random_call(config, 200, torch.device("cpu"), 3, skew=8.0)
    assert len(set(uniform.flatten().tolist())) == 16
    # the third in line is drawn before the second once in 2 * (2 / 3) ** 8 = 13 times
    counts = torch.bincount(skewed.flatten().long(), minlength=16).sort(descending=True).values.tolist()
    assert counts[0] > 190
    assert counts[1] > 150
    assert weights.shape == skewed_weights.shape == (200, 2)
    assert all(len(set(row)) == 2 for row in skewed.tolist())


def test_bench_the_batched_format(moe: Any, known_limits: None) -> None:
    arguments = ("bench", *SHAPE, "--tokens", 3, "--budget", "0.01", "--activation-format", "batched")
    assert moe(*arguments, "--json").data["results"][0]["backend"] == "plain"


def test_bench_a_checkpoint(moe: Any, folder: Path, known_limits: None) -> None:
    data = moe("bench", folder, "--tokens", 2, "--budget", "0.01", "--backend", "plain", "--json").data
    assert data["layer"].endswith("layer 1")
    assert data["results"][0]["seconds"] > 0


def test_bench_measures_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    config = FusedMoEConfig(num_experts=2, top_k=1, hidden_size=8, intermediate_size=8)
    limits = _machine.measure_limits(torch.device("cpu"), config, None)
    assert 1e8 < limits.bandwidth < 1e13
    assert 1e8 < limits.rate < 1e15
    assert limits.product == "float32"


def test_the_floor_of_a_call_is_the_larger_of_both_limits() -> None:
    config = FusedMoEConfig(num_experts=2, top_k=1, hidden_size=8, intermediate_size=8)
    moved, products = 100 / 2 * 1 + 2 * 3 * 8 * 2, 2 * 3 * 3 * 8 * 8
    limits = _machine.Limits(bandwidth=1.0, rate=1e9, product="")
    assert limits.floor(config, 100, 1, 3) == (moved, "memory")
    limits = _machine.Limits(bandwidth=1e9, rate=1.0, product="")
    assert limits.floor(config, 100, 1, 3) == (products, "products")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--tokens", "0"), "argument --tokens: expected 1 or more, got '0'"),
        (("--tokens", "a"), "argument --tokens: expected an integer, got 'a'"),
        (("--tokens", ""), "argument --tokens: expected items with commas between, got ''"),
        (("--tokens", "4,1,4"), "argument --tokens: expected each item once, got '4' twice"),
        (("--tokens", f"1,{10**23}"), f"argument --tokens: expected 1099511627776 or less, got '{10**23}'"),
        (("--budget", "0"), "argument --budget: expected a positive number"),
        (("--backend", "gpu"), "needs sm90 or newer"),
        (("--output", "/nowhere/b.json"), "the folder /nowhere does not exist"),
        (("--svg", "/nowhere/b.svg"), "the folder /nowhere does not exist"),
        (("--rate", "-1"), "argument --rate: expected a positive number"),
        (("--skew", "-1"), "argument --skew: expected 0.0 or more"),
        (("--bandwidth", "nan"), "argument --bandwidth: expected a number"),
        (("--fail-slower",), "--fail-slower needs --compare"),
    ],
)
def test_bench_refuses(moe: Any, arguments: tuple[str, ...], part: str) -> None:
    moe.refuses("bench", *SHAPE, *arguments, parts=(part,))


def test_bench_with_given_limits_measures_none(moe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_machine, "measure_limits", None)
    given = ("--bandwidth", 2, "--rate", 0.001)
    result = moe("bench", *SHAPE, "--tokens", 1, "--budget", "0.01", *given)
    assert "limits: 2 GB/s (given), 1 billion operations/s (given)" in result.out
    data = moe("bench", *SHAPE, "--tokens", 1, "--budget", "0.01", *given, "--json").data
    assert (data["bandwidth_bytes_per_second"], data["operations_per_second"]) == (2e9, 1e9)


def test_bench_with_one_limit_measures_the_other(moe: Any, known_limits: None) -> None:
    data = moe("bench", *SHAPE, "--tokens", 1, "--budget", "0.01", "--rate", 5, "--json").data
    assert (data["bandwidth_bytes_per_second"], data["operations_per_second"], data["given"]) == (1e9, 5e12, ["rate"])


def test_bench_beside_an_earlier_run(moe: Any, tmp_path: Path, known_limits: None) -> None:
    """Times that moved beyond the spread are marked; slower ones are the exit code, if it is asked for."""
    file = tmp_path / "before.json"
    arguments = ("bench", *SHAPE, "--tokens", "1,2,4,8", "--budget", "0.01")
    assert moe(*arguments, "--output", file).code == 0
    before = json.loads(file.read_text())

    def then(factors: tuple[float, ...], spread: float = 1.0) -> None:
        data = json.loads(json.dumps(before))
        data["results"] = data["results"][: len(factors)]
        for result, factor in zip(data["results"], factors, strict=True):
            result["seconds"] *= factor
            result["seconds_p10_p90"] = [factor * t for t in result["seconds_p10_p90"]]
            result["seconds_p10_p90"][0] /= spread
            result["seconds_p10_p90"][1] *= spread
        file.write_text(json.dumps(data))

    then((1e-4, 1e4, 1.0))
    result = moe(*arguments, "--compare", file)
    assert result.code == 0
    header, _, *rows = result.out.splitlines()[4:]
    assert header.split()[-2:] == ["before", "now/before"]
    assert [row.split()[-1] for row in rows[:2]] == ["slower", "faster"]
    found = moe(*arguments, "--compare", file, "--json").data["results"]
    assert [r.get("moved") for r in found][:2] == ["slower", "faster"]
    assert "ratio" not in found[3]
    assert found[0]["ratio"] == pytest.approx(found[0]["seconds"] / (1e-4 * before["results"][0]["seconds"]))
    assert moe(*arguments, "--compare", file, "--fail-slower").code == 1
    assert moe(*arguments, "--compare", file, "--fail-slower", "1e9").code == 0
    # within the spread nothing has moved
    then((1e-4, 1e4, 1.0, 1.0), spread=1e6)
    found = moe(*arguments, "--compare", file, "--fail-slower", "--json")
    assert (found.code, {r["moved"] for r in found.data["results"]}) == (0, {""})


def test_bench_compares_one_layer_with_itself_alone(moe: Any, tmp_path: Path, known_limits: None) -> None:
    file = tmp_path / "before.json"
    arguments = ("bench", *SHAPE, "--tokens", "1", "--budget", "0.01")
    assert moe(*arguments, "--output", file).code == 0
    moe.refuses(*arguments, "--activation", "gelu", "--compare", file, parts=("activation is 'silu' there",))
    good = file.read_bytes()
    moe.refuses(*arguments, "--compare", file, "--output", file, parts=("is the input",))
    assert file.read_bytes() == good
    for content, part in (
        (b"{", "before.json"),
        (b"{}", "holds no results"),
        (good.replace(b'"seconds"', b'"second"'), "holds no results"),
        (good.replace(b'"seconds": ', b'"seconds": -'), "holds no results"),
    ):
        file.write_bytes(content)
        moe.refuses(*arguments, "--compare", file, parts=(part,))
    moe.refuses(*arguments, "--compare", tmp_path / "nothing.json", parts=("nothing.json", "can't be read"))


def test_bench_draws(moe: Any, tmp_path: Path, known_limits: None) -> None:
    """Every time, and the floor, at its place: doubling a time moves it as far up wherever it is."""
    picture = tmp_path / "b.svg"
    assert moe("bench", *SHAPE, "--tokens", "1,2,4", "--budget", "0.01", "--svg", picture).code == 0
    root = ElementTree.fromstring(picture.read_text())
    name = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f"{name}circle")) == 3
    assert len(root.findall(f"{name}polyline")) == 2
    texts = [element.text for element in root.iter(f"{name}text")]
    assert {"1", "2", "4", "tokens", "µs per call", "floor", "plain"} <= set(texts)
    result = {"backend": "<&\x00>", "seconds_p10_p90": [1e-5, 4e-5], "floor_seconds": 1e-6}
    results = [{**result, "tokens": count, "seconds": 1e-5 * count} for count in (1, 2, 4)]
    data = {"scheme": "a", "layer": "b", "device_name": "c", "torch": "d", "results": results}
    root = ElementTree.fromstring(_picture.svg(data))
    points = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in root.findall(f"{name}circle")]
    steps = [(x2 - x1, y1 - y2) for (x1, y1), (x2, y2) in itertools.pairwise(points)]
    assert steps[0] == pytest.approx(steps[1], abs=0.2)
    assert min(steps[0]) > 0


# ------------------------------------------------------------------ shared


@pytest.mark.parametrize("command", COMMANDS)
def test_help(moe: Any, command: str) -> None:
    result = moe(command, "--help")
    assert result.code == 0
    assert "--json" in result.out


def test_help_lists_the_commands(moe: Any) -> None:
    out = moe("--help").out
    for command in COMMANDS:
        assert f"\n  {command} " in out
    assert moe("--version").out == f"moe-core {__version__}\n"


def test_no_command(moe: Any) -> None:
    """``moe`` alone shows what there is."""
    result = moe()
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("usage: moe COMMAND")
    assert "  explain " in result.out


def test_folded() -> None:
    text = "  keys         aa bb cc dd ee ff gg hh ii jj\nplain words that go on and on and on without an end\n\nshort"
    assert _output.folded(text, 40).split("\n") == [
        "  keys         aa bb cc dd ee ff gg hh",
        "               ii jj",
        "plain words that go on and on and on",
        "  without an end",
        "",
        "short",
    ]


def test_lines_are_folded_on_terminals_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    long = "word " * 30
    _output.emit(False, {}, long)
    assert capsys.readouterr().out == f"{long}\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    _output.emit(False, {}, long)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 40


def test_table() -> None:
    lines = _output.table(["a", "bb"], [["x", "1"], ["long", "22"]]).splitlines()
    assert lines == ["a     bb", "----  --", "x      1", "long  22"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.5, "2.5 s"), (0.25, "250 ms"), (2.5e-4, "250 µs"), (2.5e-7, "250 ns"), (0.0, "0 ns")]
)
def test_duration(seconds: float, text: str) -> None:
    assert _output.duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(12, "12 bytes"), (1536, "1.5 KiB"), (3 << 20, "3.0 MiB"), (5 << 30, "5.0 GiB")]
)
def test_bytes(count: int, text: str) -> None:
    assert _output.bytes_text(count) == text


def test_progress_is_shown_on_terminals_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with _output.progress("thinking"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with pytest.raises(CheckpointError), _output.progress("thinking"):
        raise CheckpointError("no")
    assert capsys.readouterr().err == "thinking …\r\x1b[2K"
    with _output.progress("thinking") as tell:
        tell("half done", 0.5)
        tell("\x1b[31m", None)
    shown = capsys.readouterr().err.split("\r\x1b[2K")
    assert shown == ["thinking …", f"[{'#' * 12}{'.' * 12}] half done …", "\\x1b[31m …", ""]


def test_module_runs_as_a_program(tmp_path: Path) -> None:
    """A process of its own: the exit code arrives, and stderr holds one paragraph."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "moe_core", "run", str(tmp_path)], capture_output=True, text=True, env=environment
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"moe run: {tmp_path} is no checkpoint: it has no config.json (it holds nothing)\n"


def test_closed_pipe(tmp_path: Path) -> None:
    """``moe backends | head -c 1`` ends quietly."""
    program = f'"{sys.executable}" -m moe_core backends --json 2>"{tmp_path}/err" | head -c 1 >/dev/null'
    subprocess.run(["bash", "-c", program], env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, check=True)
    assert (tmp_path / "err").read_text() == ""


def test_quickstart_writer_is_what_the_scheme_registers(plain: None) -> None:
    assert registry().scheme("plain").quickstart is write_quickstart
    assert quickstart_command.__doc__ is not None
