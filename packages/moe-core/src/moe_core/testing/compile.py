"""Compiles Triton kernels for GPUs that are not in this machine, and checks what the compiler says of them.

    python -m moe_core.testing.compile sm90
    python -m moe_core.testing.compile gfx950 --package my_package

A module that holds kernels defines ``specimens(target)``, which gets a :class:`~moe_core.device.DeviceInfo` and yields
:class:`Specimen` objects: launches as the host code makes them, on meta tensors.  Every module of the named packages
(default: core and every package that registers something with it) that defines this function is asked.  Each launch
compiles the kernels it would start, for the target and not for a device; a kernel fails when it does not compile, needs
more shared memory than a block of the target can have, or spills more bytes per thread than its specimen allows.

NVIDIA: registers and stack from the cubin, by ``cuobjdump``, which Triton brings.  AMD: from the assembly's metadata.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import importlib.util
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_core.device import DeviceInfo
from moe_core.errors import ConfigError, MoEError


@dataclass(frozen=True)
class Specimen:
    """One launch to compile.

    ``launch`` calls host code that starts kernels, on tensors of device "meta"; it must not read their values.
    ``max_spills``: bytes of local memory per thread that are accepted, with a comment where that isn't 0.
    """

    name: str
    launch: Callable[[], object]
    max_spills: int = 0


@dataclass(frozen=True)
class Usage:
    """What one compiled kernel needs: registers and spilled bytes per thread, shared memory in bytes per block."""

    specimen: str
    kernel: str
    registers: int
    spills: int
    shared: int


@dataclass(frozen=True)
class Target:
    """An architecture to compile for."""

    device: DeviceInfo

    @staticmethod
    def parse(name: str) -> Target:
        """``sm80`` … ``sm120``, ``gfx942``, ``gfx950``; raises ConfigError for what Triton does not compile for."""
        device = DeviceInfo.parse(name)
        if device.kind not in ("cuda", "hip"):
            raise ConfigError(f"Triton kernels are compiled for NVIDIA and AMD GPUs, not for {name}")
        return Target(device)

    def gpu_target(self) -> Any:
        """Triton's name of it."""
        from triton.backends.compiler import GPUTarget

        if self.device.kind == "cuda":
            return GPUTarget("cuda", self.device.capability, 32)
        return GPUTarget("hip", self.device.arch, 64)


class _Driver:
    """Stands in for Triton's driver of a GPU: answers what compiling asks, and has no device."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> str:
        # Triton keeps compiled kernels by device: a name of its own for each target keeps them apart
        return str(self.target)

    def get_current_stream(self, device: str) -> int:
        return 0


def refuse_interpreter() -> None:
    """Raise ConfigError where Triton was told to interpret kernels: there would be nothing to compile."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise ConfigError("TRITON_INTERPRET=1 is set: kernels would be interpreted; unset it to compile them")


@contextlib.contextmanager
def compiling_for(target: Target) -> Iterator[list[tuple[str, Any]]]:
    """Within the block, launching a Triton kernel compiles it for ``target`` and starts nothing.

    Yields a list that receives (kernel name, compiled kernel) of each launch.
    """
    refuse_interpreter()
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    compiled: list[tuple[str, Any]] = []
    launch = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append((self.__name__, kernel))
        return kernel

    # the property would look for a GPU
    before = driver._active
    driver.set_active(_Driver(target.gpu_target()))
    JITFunction.run = run
    try:
        yield compiled
    finally:
        JITFunction.run = launch
        driver.set_active(before)


def usage_of(kernel: Any) -> tuple[int, int]:
    """(registers per thread, bytes of local memory per thread) of a compiled kernel."""
    if "cubin" in kernel.asm:
        from triton import knobs

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kernel.cubin"
            path.write_bytes(kernel.asm["cubin"])
            command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return _number(r"REG:(\d+)", text), _number(r"STACK:(\d+)", text) + _number(r"LOCAL:(\d+)", text)
    text = kernel.asm["amdgcn"]
    return _number(r"\.vgpr_count:\s+(\d+)", text), _number(r"\.private_segment_fixed_size:\s+(\d+)", text)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise MoEError(f"the compiler's report has no {pattern!r}:\n{text[:2000]}")
    return int(found.group(1))


def compile_specimen(specimen: Specimen, target: Target) -> tuple[list[Usage], list[str]]:
    """What the specimen's kernels need, and what is wrong with them (empty if nothing is)."""
    try:
        with compiling_for(target) as compiled:
            specimen.launch()
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        return [], [f"{specimen.name}: does not compile: {type(cause).__name__}: {cause}"]
    usages, problems = [], []
    for name, kernel in compiled:
        usage = Usage(specimen.name, name, *usage_of(kernel), int(kernel.metadata.shared))
        usages.append(usage)
        if usage.spills > specimen.max_spills:
            problems.append(
                f"{specimen.name}: {name} spills {usage.spills} bytes per thread, "
                f"at most {specimen.max_spills} are accepted"
            )
        if usage.shared > target.device.shared_memory:
            problems.append(
                f"{specimen.name}: {name} needs {usage.shared} bytes of shared memory, "
                f"a block of {target.device.arch} has at most {target.device.shared_memory}"
            )
    if not compiled:
        problems.append(f"{specimen.name}: started no kernel")
    return usages, problems


def plugin_packages() -> list[str]:
    """Top-level packages that register something with core, core first."""
    groups = ("moe_core.schemes", "moe_core.backends", "moe_core.formats")
    points = (point for group in groups for point in importlib.metadata.entry_points(group=group))
    names = {re.split("[.:]", point.value)[0] for point in points}
    return ["moe_core", *sorted(names - {"moe_core"})]


def specimen_modules(packages: Iterable[str]) -> list[str]:
    """Names of the modules in ``packages`` that define ``specimens``; found by their text, none is imported."""
    names = []
    for package in packages:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise ConfigError(f"package {package!r} is not installed")
        root = Path(spec.origin).parent
        files = root.rglob("*.py") if spec.submodule_search_locations else [Path(spec.origin)]
        for path in sorted(files):
            if re.search(r"^def specimens\(", path.read_text(encoding="utf-8"), re.MULTILINE):
                inside = path.relative_to(root).with_suffix("").parts if spec.submodule_search_locations else ()
                names.append(".".join([package, *inside]).removesuffix(".__init__"))
    return names


def find_specimens(packages: Iterable[str], target: Target) -> Iterator[Specimen]:
    """Specimens for ``target`` of every module in ``packages`` that defines ``specimens(target)``."""
    for name in specimen_modules(packages):
        yield from importlib.import_module(name).specimens(target.device)


#: What forked processes compile: specimens hold functions, which cannot be sent to a process, but are inherited.
_INHERITED: list[tuple[Specimen, Target]] = []


def _compile_inherited(number: int) -> tuple[list[Usage], list[str]]:
    return compile_specimen(*_INHERITED[number])


def compile_all(specimens: list[Specimen], target: Target, jobs: int) -> Iterator[tuple[list[Usage], list[str]]]:
    """:func:`compile_specimen` of each, in order, by ``jobs`` processes where the system can fork."""
    if jobs == 1 or "fork" not in multiprocessing.get_all_start_methods():
        for specimen in specimens:
            yield compile_specimen(specimen, target)
        return
    _INHERITED[:] = [(specimen, target) for specimen in specimens]
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield from pool.imap(_compile_inherited, range(len(specimens)))


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the number of problems, at most 1."""
    parser = argparse.ArgumentParser(prog="python -m moe_core.testing.compile", description=__doc__.partition("\n")[0])
    parser.add_argument("target", help="sm80, sm89, sm90, sm100, sm120, gfx942, gfx950")
    parser.add_argument("--package", action="append", help="look for specimens here (default: core and its plug-ins)")
    parser.add_argument("--only", default="", help="specimens whose name contains this text")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    options = parser.parse_args(arguments)
    start, problems, count = time.perf_counter(), [], 0
    try:
        refuse_interpreter()
        target = Target.parse(options.target)
        packages = options.package or plugin_packages()
        specimens = [s for s in find_specimens(packages, target) if options.only in s.name]
    except MoEError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{'specimen':60} {'kernel':28} {'registers':>9} {'spills':>6} {'shared':>7}", flush=True)
    for usages, found in compile_all(specimens, target, max(options.jobs, 1)):
        for u in usages:
            print(f"{u.specimen:60} {u.kernel:28} {u.registers:9} {u.spills:6} {u.shared:7}", flush=True)
        problems += found
        count += len(usages)
    if not specimens:
        problems.append(f"no specimens for {options.target} in {', '.join(packages)}")
    for problem in problems:
        print(f"FAILED {problem}", file=sys.stderr)
    seconds = time.perf_counter() - start
    print(f"{options.target}: {count} kernels of {len(specimens)} specimens, {len(problems)} problems, {seconds:.0f} s")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
