"""Packages of other people: a backend and a checkpoint format for existing schemes, and a scheme, found by entry point.

The examples are built as wheels and unpacked beside the environment; nothing of core or the schemes knows them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., str]

LAYER = """
import torch, moe_core as mc
torch.manual_seed(0)
config = mc.FusedMoEConfig(num_experts=4, top_k=2, hidden_size=256, intermediate_size=128, dtype=torch.float32)
x = torch.randn(5, 256)
tw, ids = torch.rand(5, 2), torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0]])  # expert 3 gets nothing
"""

BACKEND = (
    LAYER
    + """
w13, w2 = (torch.randn(4, 256, 256).to(torch.float8_e4m3fn), torch.randn(4, 256, 128).to(torch.float8_e4m3fn))
s13, s2 = torch.rand(4, 2, 2) / 64, torch.rand(4, 2, 1) / 64
oracle = mc.oracle("fp8")
added = [b for b in oracle.table() if b.name == "preloaded"]
assert len(added) == 1 and added[0].origin == "moe-example-backend 0.1.0", oracle.table()
keys = {"weight_key": mc.kFp8Static128BlockSym, "activation_key": None}
selection = oracle.select(config, **keys, device="cpu")  # it stands before torch, and comes first where no kernel fits
assert selection.backend == "preloaded", selection.report
assert oracle.select(config, **keys, device="cpu", moe_backend="torch").backend == "torch"
gpu = mc.FusedMoEConfig(num_experts=4, top_k=2, hidden_size=256, intermediate_size=128)
found = oracle.select(gpu, **keys, device="sm90", environment=mc.Environment({"triton": "3.7"}))
assert found.backend == "marlin", found.report  # kernels keep their places
weights = oracle.convert(selection, w13=w13, w2=w2, w13_scale=s13, w2_scale=s2)
y = oracle.make_kernel(selection, weights).apply(x, topk_weights=tw, topk_ids=ids)

wide = lambda w, s: w.double() * s.double().repeat_interleave(128, 1).repeat_interleave(128, 2)
d13, d2 = wide(w13, s13), wide(w2, s2)
expected = torch.zeros(5, 256, dtype=torch.float64)
for token in range(5):
    for slot in range(2):
        e = ids[token, slot]
        gate, up = (d13[e] @ x[token].double()).chunk(2)
        expected[token] += tw[token, slot].double() * (d2[e] @ (gate * gate.sigmoid() * up))
# float32 products of 256 and 128 terms: errors grow at most linearly with the terms
error = (y.double() - expected).abs().max() / expected.abs().max()
assert error < (256 + 128 + 8) * 2**-24, error
print("ok")
"""
)

SCHEME = (
    LAYER
    + """
assert "plain" in mc.registry().scheme_names()
oracle = mc.oracle("plain")
selection = oracle.select(config, weight_key=None, activation_key=None, device="cpu")
w13, w2 = torch.randn(4, 256, 256) / 16, torch.randn(4, 256, 128) / 16
y = oracle.make_kernel(selection, oracle.convert(selection, w13=w13, w2=w2)).apply(x, topk_weights=tw, topk_ids=ids)
expected = torch.zeros(5, 256, dtype=torch.float64)
for token in range(5):
    for slot in range(2):
        e = ids[token, slot]
        gate, up = (w13[e].double() @ x[token].double()).chunk(2)
        expected[token] += tw[token, slot].double() * (w2[e].double() @ (gate * gate.sigmoid() * up))
error = (y.double() - expected).abs().max() / expected.abs().max()
assert error < (256 + 128 + 8) * 2**-24, error
print("ok")
"""
)

REFUSED = """
import warnings
import moe_core as mc
warnings.simplefilter("ignore", mc.PluginWarning)
config = mc.FusedMoEConfig(num_experts=4, top_k=2, hidden_size=256, intermediate_size=128)
keys = {{"weight_key": mc.kFp8Static128BlockSym, "activation_key": mc.kFp8Dynamic128Sym}}
try:
    mc.oracle("{scheme}").select(config, **keys, device="cpu", moe_backend="{backend}")
    print("works:")
except mc.MoEError as error:
    print(f"{{type(error).__name__}}:", error)
print(*mc.registry().faults())
assert mc.oracle("fp8").select(config, **keys, device="cpu").backend == "torch"  # nothing else is touched
"""


def build(project: Path, target: Path) -> None:
    """Builds a wheel of ``project`` and unpacks it into ``target``: what installing a pure wheel does."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target / "dist")]
    subprocess.run(command, cwd=project, check=True, capture_output=True)
    for wheel in (target / "dist").glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, root: Path) -> str:
    """A directory with the examples installed, for PYTHONPATH."""
    target = tmp_path_factory.mktemp("site")
    for name in ("third-party-backend", "third-party-format", "third-party-scheme"):
        build(root / "examples" / name, target)
    return str(target)


@pytest.fixture
def changed(tmp_path: Path, installed: str) -> Callable[[str, str, str, str], str]:
    """Installs one example in which one text of one file is replaced; returns the directory for PYTHONPATH."""

    def install(package: str, file: str, old: str, new: str) -> str:
        for path in Path(installed).glob(f"*{package}*"):
            shutil.copytree(path, tmp_path / path.name)
        (path,) = tmp_path.glob(file)
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
        return str(tmp_path)

    return install


def test_backend_of_another_package_is_found_taken_by_name_and_right(run_python: Run, installed: str) -> None:
    assert run_python(BACKEND, PYTHONPATH=installed).strip() == "ok"


def test_backend_and_scheme_of_other_packages_pass_the_kits(tmp_path: Path, root: Path, installed: str) -> None:
    shutil.copytree(root / "examples" / "third-party-scheme" / "tests", tmp_path / "tests")
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "tests"]
    # compiling the computation of core takes long, and is tested there
    once = "not (TestTorch and (compile or opcheck))"
    command += ["--moe-experts", "example_backend.experts:PreloadedExperts", "-k", once]
    environment = {**os.environ, "PYTHONPATH": installed}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    for test in ("TestTorch::test_conformance", "PreloadedExperts::values"):
        assert test in done.stdout


def test_format_of_another_package_passes_its_tests(tmp_path: Path, root: Path, installed: str) -> None:
    shutil.copytree(root / "examples" / "third-party-format" / "tests", tmp_path / "tests")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "tests"]
    environment = {**os.environ, "PYTHONPATH": installed}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert "4 passed" in done.stdout


def test_scheme_of_another_package_is_found_and_right(run_python: Run, installed: str) -> None:
    assert run_python(SCHEME, PYTHONPATH=installed).strip() == "ok"


@pytest.mark.parametrize(
    ("package", "file", "old", "new", "asked", "error", "named"),
    [
        (
            "example_backend",
            "example_backend/experts.py",
            "interface_api = (1, 0)",
            "interface_api = (7, 0)",
            "fp8.preloaded",
            "ProtocolVersionError",
            ["moe-example-backend 0.1.0", "fp8.preloaded", "7.0", "1.0"],
        ),
        (
            "example_backend",
            "example_backend/experts.py",
            "    interface_api = (1, 0)\n",
            "",
            "fp8.preloaded",
            "ProtocolVersionError",
            ["moe-example-backend 0.1.0", "fp8.preloaded"],
        ),
        (
            "example_scheme",
            "example_scheme/__init__.py",
            "interface_api=(1, 0)",
            "interface_api=(7, 0)",
            "plain.auto",
            "ProtocolVersionError",
            ["moe-example-scheme 0.1.0", "plain", "7.0", "1.0"],
        ),
        (
            "example_backend",
            "*.dist-info/entry_points.txt",
            "fp8.preloaded",
            "fp8.torch",
            "fp8.torch",
            "works",
            ["moe-example-backend 0.1.0", "torch"],
        ),
        (
            "example_scheme",
            "*.dist-info/entry_points.txt",
            "plain = ",
            "fp8 = ",
            "fp8.auto",
            "works",
            ["moe-example-scheme 0.1.0", "moe-fp8 0.1.0", "fp8"],
        ),
        (
            "example_scheme",
            "*.dist-info/entry_points.txt",
            "example_scheme:SCHEME",
            "example_scheme:NOTHING",
            "plain.auto",
            "RegistryError",
            ["moe-example-scheme 0.1.0", "example_scheme:NOTHING"],
        ),
    ],
    ids=["other-protocol", "no-protocol", "scheme-of-other-protocol", "taken-name", "scheme-twice", "broken"],
)
def test_plugin_that_does_not_fit_is_named_and_harms_nobody(
    run_python: Run,
    changed: Callable[[str, str, str, str], str],
    package: str,
    file: str,
    old: str,
    new: str,
    asked: str,
    error: str,
    named: list[str],
) -> None:
    scheme, _, backend = asked.partition(".")
    printed = run_python(REFUSED.format(scheme=scheme, backend=backend), PYTHONPATH=changed(package, file, old, new))
    assert printed.startswith(f"{error}:"), printed
    assert all(name in printed for name in named), printed
