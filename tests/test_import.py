"""Importing core stays cheap: it loads neither Triton, nor a kernel library, nor a scheme."""

from __future__ import annotations

from collections.abc import Callable

import pytest

# what `import torch` itself loads is not core's doing; after each module, what was loaded for it and those before
NEW_MODULES = """
import importlib, sys, torch
before = set(sys.modules)
for module in {modules}:
    importlib.import_module(module)
    print(module, *sorted({{name.partition(".")[0] for name in set(sys.modules) - before}}))
"""

# The processor's time, which a busy machine stretches too, but that of torch alike.  A full garbage collection of
# torch's objects (80 ms) falls into this import or elsewhere, by their number.
ADDED = """
import gc, time
times = [time.process_time()]
import torch
times.append(time.process_time())
gc.disable()
times.append(time.process_time())
import moe_core
times.append(time.process_time())
print((times[3] - times[2]) / (times[1] - times[0]))
"""

#: it takes 2 to 4 percent; Triton would add more than 10
BUDGET = 0.06


#: what packages may import that does not import Triton
LIGHT = ("moe_core", "moe_core.api.experts", "moe_core.api.formats", "moe_core.api.libraries", "moe_core.api.models")


def loaded_by(run_python: Callable[..., str], *modules: str) -> dict[str, set[str]]:
    """The packages that are loaded once each module is, in this order, in one process."""
    lines = [line.split() for line in run_python(NEW_MODULES.format(modules=modules)).splitlines()]
    return {module: set(loaded) for module, *loaded in lines}


def test_core_loads_nothing_heavy(run_python: Callable[..., str]) -> None:
    heavy = {"triton", "flashinfer", "numpy", "safetensors", "matplotlib", "pytest", "hypothesis"}
    found = loaded_by(run_python, *LIGHT)
    assert list(found) == list(LIGHT)
    for loaded in found.values():
        assert not loaded & heavy
        assert {name for name in loaded if name.startswith("moe_")} == {"moe_core"}


@pytest.mark.parametrize("package", ["moe_fp8", "moe_int8", "moe_mxfp4", "moe_wna16"])
def test_scheme_loads_neither_triton_nor_another_scheme(package: str, run_python: Callable[..., str]) -> None:
    loaded = loaded_by(run_python, package)[package]
    assert "triton" not in loaded
    assert {name for name in loaded if name.startswith("moe_")} <= {"moe_core", package}


def test_commands_that_look_load_no_kernels(run_python: Callable[..., str]) -> None:
    code = """
import sys
from moe_core.cli.main import main
for arguments in (["backends"], ["doctor"]):
    assert main(arguments) == 0
print("triton" in sys.modules)
"""
    assert run_python(code).splitlines()[-1] == "False"


def test_core_adds_little_to_torch(run_python: Callable[..., str]) -> None:
    # the smallest of a few runs: the first may write byte code
    shares = []
    for _ in range(5):
        shares.append(float(run_python(ADDED)))
        if shares[-1] < BUDGET:
            return
    pytest.fail(f"`import moe_core` takes {min(shares):.1%} of the time of `import torch`, allowed are {BUDGET:.0%}")


def test_every_public_name_is_shown_and_there(run_python: Callable[..., str]) -> None:
    modules = (*LIGHT, "moe_core.api.sm90", "moe_core.api.kernels")
    code = f"""
import importlib
for name in {modules}:
    module = importlib.import_module(name)
    print(name, sorted(set(module.__all__) - set(dir(module))), [n for n in module.__all__ if not hasattr(module, n)])
"""
    assert run_python(code).splitlines() == [f"{name} [] []" for name in modules]
