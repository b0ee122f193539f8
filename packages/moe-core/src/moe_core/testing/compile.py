"""Compile Triton kernels for GPUs that are not installed, and check the compiled code.

    python -m moe_core.testing.compile sm90
    python -m moe_core.testing.compile gfx950 --package my_package
    python -m moe_core.testing.compile sm80 sm90 gfx950 --cover 2

A module with kernels defines ``specimens(target)``. It takes a :class:`~moe_core.spec.device.DeviceInfo` and yields
`moe_core.kernels.launch.example.Specimen` objects: launches as the host code makes them, on meta tensors. All such
modules of the named packages are used; the default is core and every package that registers something with it. Each
launch compiles the kernels that it would start, for the target and without a device.

A kernel fails if it

- does not compile,
- needs more shared memory than a CTA of the target can have,
- spills more bytes per thread than its specimen allows,
- multiplies registers that the next iteration overwrites (:mod:`moe_core.testing.in_flight`),
- leaves a warp diverged after an atomic (:mod:`moe_core.testing.reconverged`),
- lets data reuse the memory of a live barrier (:mod:`moe_core.testing.barriers`), or
- may overlap the preceding launch and accesses memory too early (:mod:`moe_core.testing.early_access`).

``--cover`` compiles fewer launches, chosen for all targets together by :mod:`moe_core.testing.compile_cover`. The host
code of every specimen still runs for every target.

On NVIDIA, registers, stack and instructions are read from the cubin with ``cuobjdump``, which Triton includes. On AMD,
they come from the metadata of the assembly.
"""

from __future__ import annotations

import argparse
import dataclasses
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
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_core.errors import ConfigError, MoEError
from moe_core.kernels.launch.compile_target import Target, compiling_for, launching, refuse_interpreter
from moe_core.kernels.launch.describe import Value, describe
from moe_core.kernels.launch.example import Specimen
from moe_core.testing.barriers import abandoned_barriers
from moe_core.testing.compile_cases import backend_specimens
from moe_core.testing.compile_cover import Launch, choose
from moe_core.testing.early_access import refused_accesses, waits
from moe_core.testing.in_flight import register_products_in_flight
from moe_core.testing.reconverged import has_atomics, split_warps


@dataclass(frozen=True)
class Usage:
    """Resources of one compiled kernel.

    Attributes:
        specimen: Name of the specimen.
        kernel: Name of the kernel.
        registers: Registers per thread.
        spills: Spilled bytes per thread.
        shared: Shared memory per CTA, in bytes.
    """

    specimen: str
    kernel: str
    registers: int
    spills: int
    shared: int


def usage_of(kernel: Any) -> tuple[int, int]:
    """Return the register and spill counts of a compiled kernel.

    Args:
        kernel: Kernel compiled by Triton.

    Returns:
        (registers per thread, bytes of local memory per thread).

    Raises:
        MoEError: The compiler's report lacks a figure.
    """
    if "cubin" in kernel.asm:
        text = _cuobjdump(kernel, "--dump-resource-usage")
        return _number(r"REG:(\d+)", text), _number(r"STACK:(\d+)", text) + _number(r"LOCAL:(\d+)", text)
    text = kernel.asm["amdgcn"]
    return _number(r"\.vgpr_count:\s+(\d+)", text), _number(r"\.private_segment_fixed_size:\s+(\d+)", text)


def _cuobjdump(kernel: Any, option: str) -> str:
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(kernel.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, option, str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise MoEError(f"the compiler's report has no {pattern!r}:\n{text[:2000]}")
    return int(found.group(1))


def launches_of(specimen: Specimen, target: Target) -> list[tuple[str, frozenset[Value]]]:
    """Return the kernels that a specimen launches, without compiling them.

    Args:
        specimen: The specimen.
        target: Target that it would be compiled for.

    Returns:
        The name of each kernel, and the values it would be compiled for.
    """
    found: list[tuple[str, frozenset[Value]]] = []

    def start(kernel: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        found.append((kernel.__name__, describe(kernel, arguments, keywords)))

    with launching(target, start):
        specimen.launch()
    return found


@dataclass(frozen=True)
class Task:
    """Unit of work of one process.

    Attributes:
        specimen: The specimen to compile.
        target: The target to compile for.
        only: Numbers of the launches to compile; None for all.
    """

    specimen: Specimen
    target: Target
    only: frozenset[int] | None = None


def cover(tasks: list[Task], strength: int) -> list[Task]:
    """Restrict tasks to the launches chosen by :func:`~moe_core.testing.compile_cover.choose`.

    A specimen that launches nothing, or fails before anything is compiled, stays whole: compiling it reports the
    problem.

    Args:
        tasks: The tasks.
        strength: 1 to cover every value, 2 to cover every pair of values.

    Returns:
        The tasks that remain.
    """
    launches: dict[tuple[str, str, frozenset[Value]], Launch] = {}
    whole: set[int] = set()
    for i, task in enumerate(tasks):
        try:
            found = launches_of(task.specimen, task.target)
        except Exception:
            found = []
        if not found:
            whole.add(i)
        for number, (kernel, values) in enumerate(found):
            arch = task.target.device.arch
            known = launches.get((arch, kernel, values))
            # Of equal launches, keep the one with the lowest spill limit.
            if known is None or task.specimen.max_spills < tasks[known.specimen].specimen.max_spills:
                launches[arch, kernel, values] = Launch(arch, i, number, kernel, values)
    chosen: dict[int, set[int]] = {i: set() for i in sorted(whole)}
    for launch in choose(list(launches.values()), strength):
        chosen.setdefault(launch.specimen, set()).add(launch.number)
    return [
        task if i in whole else dataclasses.replace(task, only=frozenset(chosen[i]))
        for i, task in enumerate(tasks)
        if i in chosen
    ]


def compile_specimen(
    specimen: Specimen, target: Target, only: Collection[int] | None = None
) -> tuple[list[Usage], list[str]]:
    """Compile the kernels of a specimen and check them.

    Args:
        specimen: The specimen.
        target: The target to compile for.
        only: Numbers of the launches to compile; None for all.

    Returns:
        (resources of each kernel, descriptions of the problems).
    """
    where = f"{target.device.arch}: {specimen.name}"
    try:
        with compiling_for(target, only) as compiled:
            specimen.launch()
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        return [], [f"{where}: does not compile: {type(cause).__name__}: {cause}"]
    usages, problems = [], []
    for name, kernel in compiled:
        usage = Usage(specimen.name, name, *usage_of(kernel), int(kernel.metadata.shared))
        usages.append(usage)
        if usage.spills > specimen.max_spills:
            problems.append(
                f"{where}: {name} spills {usage.spills} bytes per thread, at most {specimen.max_spills} are accepted"
            )
        if usage.shared > target.device.shared_memory:
            problems.append(
                f"{where}: {name} needs {usage.shared} bytes of shared memory, "
                f"a block of {target.device.arch} has at most {target.device.shared_memory}"
            )
        # Gluon kernels, which wait explicitly, have TTGIR too.
        ttgir = kernel.asm.get("ttgir", "")
        running = register_products_in_flight(ttgir)
        if running:
            problems.append(
                f"{where}: {name} has up to {running} products with registers in flight at the end of a loop's step: "
                "moe_core.kernels.device.wait.wait_for_mma makes them end there"
            )
        abandoned = abandoned_barriers(ttgir)
        if abandoned:
            problems.append(
                f"{where}: {name} has barriers that are neither invalidated nor passed to warp_specialize, so that "
                f"data may get their memory: {', '.join(abandoned)}"
            )
        if "cubin" in kernel.asm and has_atomics(kernel.asm["ptx"]):
            split = split_warps(_cuobjdump(kernel, "--dump-sass"))
            if split:
                problems.append(
                    f"{where}: {name} does not join a warp again behind its atomics at {', '.join(split)}: "
                    "let all threads pass the instruction, one of them by a predicate"
                )
        if getattr(kernel.metadata, "launch_pdl", False):
            problems += [f"{where}: {name} {wrong}" for wrong in _too_early(name, kernel)]
    if not compiled:
        problems.append(f"{where}: started no kernel")
    return usages, problems


def _too_early(name: str, kernel: Any) -> list[str]:
    """Problems of an NVIDIA kernel that may overlap the preceding launch."""
    if not waits(kernel.asm["ptx"]):
        return ["may run beside the launch before it, and never waits for it: moe_core.kernels.device.pdl.begin_pdl"]
    arguments = kernel.src.fn.arg_names
    # Constants inside of tuples are wrapped.
    constants = {
        (arguments[first], *inside): getattr(value, "value", value)
        for (first, *inside), value in kernel.src.constants.items()
    }
    early = refused_accesses(name, constants, kernel.asm["ttgir"], kernel.asm["ptx"])
    if not early:
        return []
    allowed = "moe_core.testing.early_access.ALLOWED has what may be there"
    return [f"touches memory before it has waited for the launch before it: {', '.join(early)}; {allowed}"]


def plugin_packages() -> list[str]:
    """Top-level packages that register something with core, core first."""
    groups = ("moe_core.schemes", "moe_core.backends", "moe_core.formats")
    points = (point for group in groups for point in importlib.metadata.entry_points(group=group))
    names = {re.split("[.:]", point.value)[0] for point in points}
    return ["moe_core", *sorted(names - {"moe_core"})]


def specimen_modules(packages: Iterable[str]) -> list[str]:
    """Return the names of the modules that define ``specimens``.

    They are found by their text; none is imported.

    Args:
        packages: Names of packages.

    Returns:
        Full names of the modules.

    Raises:
        ConfigError: A package is not installed.
    """
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
    """Yield the specimens for a target.

    Args:
        packages: Packages whose modules and registered backends are used.
        target: The target to compile for.

    Yields:
        The specimens of every module that defines ``specimens(target)``, then those of the backends.
    """
    for name in specimen_modules(packages):
        yield from importlib.import_module(name).specimens(target.device)
    yield from backend_specimens(target.device, set(packages))


#: Tasks of forked processes. Specimens hold functions, which cannot be pickled but are inherited.
_INHERITED: list[Task] = []


def _compile_inherited(number: int) -> tuple[list[Usage], list[str]]:
    task = _INHERITED[number]
    return compile_specimen(task.specimen, task.target, task.only)


def compile_all(tasks: list[Task], jobs: int) -> Iterator[tuple[list[Usage], list[str]]]:
    """Run :func:`compile_specimen` on each task.

    Args:
        tasks: The tasks.
        jobs: Number of processes, where the system can fork.

    Yields:
        The results, in order.
    """
    if jobs == 1 or "fork" not in multiprocessing.get_all_start_methods():
        for task in tasks:
            yield compile_specimen(task.specimen, task.target, task.only)
        return
    _INHERITED[:] = tasks
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield from pool.imap(_compile_inherited, range(len(tasks)))


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Command-line arguments; None for those of the process.

    Returns:
        0 on success, 1 if a kernel has a problem, 2 if the arguments are invalid.
    """
    parser = argparse.ArgumentParser(prog="python -m moe_core.testing.compile", description=__doc__.partition("\n")[0])
    parser.add_argument("targets", nargs="+", metavar="target", help="sm80, sm89, sm90, sm100, sm120, gfx942, gfx950")
    parser.add_argument("--package", action="append", help="look for specimens here (default: core and its plug-ins)")
    parser.add_argument("--only", default="", help="specimens whose name contains this text")
    parser.add_argument(
        "--cover",
        type=int,
        choices=(1, 2),
        help="compile fewer: every kernel for every target, and every value (1) or pair of values (2) of a kernel's "
        "arguments for one of the targets (default: everything)",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    options = parser.parse_args(arguments)
    start, problems = time.perf_counter(), []
    try:
        refuse_interpreter()
        targets = [Target.parse(name) for name in options.targets]
        packages = options.package or plugin_packages()
        tasks = [Task(s, t) for t in targets for s in find_specimens(packages, t) if options.only in s.name]
    except MoEError as error:
        print(error, file=sys.stderr)
        return 2
    found = Counter(task.target.device.arch for task in tasks)
    problems += [
        f"nothing to compile for {target.device.arch} in {', '.join(packages)}: no backend of these claims it "
        "with kernels, and none of their modules defines specimens(target)"
        for target in targets
        if not found[target.device.arch]
    ]
    if options.cover:
        tasks = cover(tasks, options.cover)
    print(f"{'':7} {'specimen':52} {'kernel':28} {'registers':>9} {'spills':>6} {'shared':>7}", flush=True)
    kernels: Counter[str] = Counter()
    for task, (usages, wrong) in zip(tasks, compile_all(tasks, max(options.jobs, 1)), strict=True):
        arch = task.target.device.arch
        for u in usages:
            print(f"{arch:7} {u.specimen:52} {u.kernel:28} {u.registers:9} {u.spills:6} {u.shared:7}", flush=True)
        problems += wrong
        kernels[arch] += len(usages)
    for problem in problems:
        print(f"FAILED {problem}", file=sys.stderr)
    compiled = Counter(task.target.device.arch for task in tasks)
    for arch, count in found.items():
        chosen = f" (--cover {options.cover})" if options.cover else ""
        print(f"{arch}: {kernels[arch]} kernels of {compiled[arch]} specimens out of {count}{chosen}")
    print(f"{len(problems)} problem{'s' * (len(problems) != 1)}, {time.perf_counter() - start:.0f} s")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
