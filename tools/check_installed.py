"""Check an environment with moe-core and at most one other package, installed from wheels.

Usage: ``python -I tools/check_installed.py moe-core [moe-NAME]``, with that environment's interpreter. It checks that
exactly the named packages are installed and importable, that the registry finds a scheme without importing other
packages, and that ``moe quickstart`` runs.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ALL = ("moe-core", "moe-fp8", "moe-int8", "moe-mxfp4", "moe-sglang", "moe-transformers", "moe-vllm", "moe-wna16")
MOE = str(Path(sys.executable).with_name("moe"))


def expect(condition: bool, message: str) -> None:
    """Exit with an error unless a condition holds.

    Args:
        condition: The condition.
        message: The error.
    """
    if not condition:
        sys.exit(f"{' + '.join(sys.argv[1:])}: {message}")


def modules_of(code: str) -> set[str]:
    """Run code in a fresh interpreter and return what it imported.

    Args:
        code: Python code.

    Returns:
        Top-level names of the modules.
    """
    program = code + "\nimport sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True)
    expect(done.returncode == 0, f"{code!r} failed:\n{done.stderr}")
    return set(done.stdout.split())


def schemes_of(packages: list[str]) -> list[str]:
    """Return the schemes that packages register.

    Args:
        packages: Names of distributions.

    Returns:
        Names of the schemes.
    """
    points = importlib.metadata.entry_points(group="moe_core.schemes")
    return [point.name for point in points if point.dist is not None and point.dist.metadata["Name"] in packages]


def check_imports(packages: list[str]) -> None:
    """Check what is installed and imported.

    Args:
        packages: Names of the distributions that must be installed.
    """
    installed = {d.metadata["Name"] for d in importlib.metadata.distributions()}
    expect(installed & set(ALL) == set(packages), f"installed are {sorted(installed & set(ALL))}")
    for name in set(ALL) - set(packages):
        expect(importlib.util.find_spec(name.replace("-", "_")) is None, f"{name} is importable, but not installed")

    for name in packages:
        modules_of(f"import {name.replace('-', '_')}")
    listed = modules_of("import moe_core; moe_core.registry().scheme_names()")
    expect("triton" not in listed, "listing the schemes imports triton")
    expect({m for m in listed if m.startswith("moe_")} == {"moe_core"}, "listing the schemes imports one")
    for name in schemes_of(packages):
        loaded = modules_of(f"import moe_core; assert moe_core.oracle({name!r}).table()")
        foreign = {m for m in loaded if m.startswith("moe_")} - {p.replace("-", "_") for p in packages}
        expect(not foreign, f"loading the scheme {name} imports {sorted(foreign)}")


def check_command_line(packages: list[str]) -> str:
    """Run ``moe backends``, the help of added commands, and ``moe quickstart``.

    Args:
        packages: Names of the installed distributions.

    Returns:
        A report on ``moe quickstart``.
    """
    done = subprocess.run([MOE, "backends", "--json"], capture_output=True, text=True)
    expect(done.returncode == 0, f"moe backends failed:\n{done.stderr}")
    json.loads(done.stdout)
    for point in importlib.metadata.entry_points(group="moe_core.commands"):
        done = subprocess.run([MOE, point.name, "--help"], capture_output=True, text=True)
        expect(done.returncode == 0, f"moe {point.name} --help failed:\n{done.stderr}")
    start = time.perf_counter()
    done = subprocess.run([MOE, "quickstart"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    seconds = time.perf_counter() - start
    if schemes_of(packages):
        expect(done.returncode == 0, f"moe quickstart failed:\n{done.stdout}{done.stderr}")
        expect(seconds < 60, f"moe quickstart took {seconds:.0f} s")
        return f"moe quickstart ran in {seconds:.1f} s"
    expect(done.returncode == 2, f"moe quickstart without a scheme ended with {done.returncode}, expected 2")
    expect("Traceback" not in done.stderr, f"moe quickstart without a scheme printed a traceback:\n{done.stderr}")
    expect("pip install" in done.stderr + done.stdout, "moe quickstart without a scheme does not say what to install")
    return "no scheme registered; moe quickstart says what to install"


if __name__ == "__main__":
    # Both checks start one process at a time, so they run in parallel.
    with ThreadPoolExecutor() as pool:
        imports, said = (pool.submit(check, sys.argv[1:]) for check in (check_imports, check_command_line))
        imports.result()
        print(f"{' + '.join(sys.argv[1:])}: {said.result()}")
