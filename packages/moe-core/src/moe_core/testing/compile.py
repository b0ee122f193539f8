"""Compile Triton kernels for GPUs that are not installed, and check the compiled code.

    python -m moe_core.testing.compile sm90
    python -m moe_core.testing.compile gfx950 --package my_package --examples my_package.kernels:examples

The kernels are those that layers of registered backends launch, for everything that they claim
(:mod:`moe_core.testing.meta_layers`); by default of core and of every package that registers something with it. Other
kernels are launched by a function that takes a :class:`~moe_core.spec.device.DeviceInfo` and yields
:class:`~moe_core.testing.launches.Example` objects.

The host code of every example runs; nothing is launched. Each distinct kernel is then compiled. It fails if it

- does not compile,
- needs more shared memory than a CTA of the target can have, or
- spills more bytes per thread than its examples accept.

On NVIDIA, registers, stack and instructions are read from the cubin with ``cuobjdump``, which Triton includes. On AMD,
they come from the metadata of the assembly.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import multiprocessing
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from moe_core.errors import ConfigError, MoEError
from moe_core.kernels.launch.compile_target import Target, compiling_for, refuse_interpreter
from moe_core.spec.device import DeviceInfo
from moe_core.testing.launches import Compilation, Example, distinct_launches
from moe_core.testing.meta_layers import backend_examples

#: further checks of a kernel that Triton has compiled; returns descriptions that follow the kernel's name
Hazards = Callable[[Any], Iterable[str]]


def no_hazards(kernel: Any) -> Iterable[str]:
    """Find nothing."""
    return ()


def compile_one(one: Compilation, hazards: Hazards = no_hazards) -> tuple[str, list[str]]:
    """Compile a kernel and check it.

    Args:
        one: The kernel.
        hazards: Further checks.

    Returns:
        (row of the report, descriptions of the problems).
    """
    name, where = one.name, f"{one.arch}: {one.example}: {one.name}"
    try:
        with compiling_for(one.target) as compiled:
            one.kernel[(1,)](*one.arguments, **one.options)
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        return f"{one.arch:7} {one.example:52} {name}", [f"{where} does not compile: {type(cause).__name__}: {cause}"]
    kernel = compiled[0][1]
    registers, spills = usage_of(kernel)
    shared, available = int(kernel.metadata.shared), one.target.device.shared_memory
    problems = []
    if spills > one.max_spills:
        problems.append(f"{where} spills {spills} bytes per thread, at most {one.max_spills} are accepted")
    if shared > available:
        problems.append(f"{where} needs {shared} bytes of shared memory, a CTA of {one.arch} has at most {available}")
    problems += [f"{where} {hazard}" for hazard in hazards(kernel)]
    return f"{one.arch:7} {one.example:52} {name:28} {registers:9} {spills:6} {shared:7}", problems


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
        text = cuobjdump(kernel, "--dump-resource-usage")
        return _number(r"REG:(\d+)", text), _number(r"STACK:(\d+)", text) + _number(r"LOCAL:(\d+)", text)
    text = kernel.asm["amdgcn"]
    return _number(r"\.vgpr_count:\s+(\d+)", text), _number(r"\.private_segment_fixed_size:\s+(\d+)", text)


def cuobjdump(kernel: Any, option: str) -> str:
    """Return what ``cuobjdump`` prints about an NVIDIA kernel.

    Args:
        kernel: Kernel compiled by Triton.
        option: Option of the tool, such as ``--dump-sass``.

    Returns:
        The text.
    """
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


def plugin_packages() -> list[str]:
    """Top-level packages that register something with core, core first."""
    groups = ("moe_core.schemes", "moe_core.backends", "moe_core.formats")
    points = (point for group in groups for point in importlib.metadata.entry_points(group=group))
    names = {re.split("[.:]", point.value)[0] for point in points}
    return ["moe_core", *sorted(names - {"moe_core"})]


#: Work of forked processes. Launches hold functions, which cannot be pickled but are inherited.
_INHERITED: list[Callable[[], tuple[str, list[str]]]] = []


def _run_inherited(number: int) -> tuple[str, list[str]]:
    return _INHERITED[number]()


def compile_all(
    launches: Sequence[Compilation], jobs: int, hazards: Hazards = no_hazards
) -> Iterator[tuple[str, list[str]]]:
    """Run :func:`compile_one` on each launch.

    Args:
        launches: The launches.
        jobs: Number of processes, where the system can fork.
        hazards: Further checks.

    Yields:
        The results, in order.
    """
    _INHERITED[:] = [partial(compile_one, one, hazards) for one in launches]
    if jobs == 1 or "fork" not in multiprocessing.get_all_start_methods():
        yield from map(_run_inherited, range(len(launches)))
        return
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield from pool.imap(_run_inherited, range(len(launches)))


def check_targets(
    targets: Sequence[str],
    examples_of: Callable[[DeviceInfo], Iterable[Example]],
    *,
    jobs: int = 1,
    choose: Callable[[list[Compilation]], Sequence[Compilation]] = list,
    hazards: Hazards = no_hazards,
) -> int:
    """Compile and check kernels, with a report on standard output.

    Args:
        targets: Architectures, such as sm90.
        examples_of: Returns the examples that launch the kernels of a device.
        jobs: Number of processes.
        choose: Chooses launches to compile from those of all targets.
        hazards: Further checks of each kernel.

    Returns:
        0 on success, 1 if a kernel has a problem, 2 if the arguments are invalid.
    """
    start = time.perf_counter()
    launches: list[Compilation] = []
    problems: list[str] = []
    try:
        refuse_interpreter()
        for target in map(Target.parse, targets):
            examples = list(examples_of(target.device))
            found, wrong = distinct_launches(examples, target)
            launches, problems = launches + found, problems + wrong
            if not examples:
                problems.append(f"{target.device.arch}: nothing to compile; no backend claims it with kernels")
    except MoEError as error:
        print(error, file=sys.stderr)
        return 2
    chosen = choose(launches)
    print(f"{'':7} {'example':52} {'kernel':28} {'registers':>9} {'spills':>6} {'shared':>7}", flush=True)
    for row, wrong in compile_all(chosen, jobs, hazards):
        print(row, flush=True)
        problems += wrong
    for problem in problems:
        print(f"FAILED {problem}", file=sys.stderr)
    every, compiled = (Counter(one.arch for one in several) for several in (launches, chosen))
    for arch, count in every.items():
        print(f"{arch}: {compiled[arch]} of {count} kernels")
    print(f"{len(problems)} problem{'s' * (len(problems) != 1)}, {time.perf_counter() - start:.0f} s")
    return 1 if problems else 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Command-line arguments; None for those of the process.

    Returns:
        Exit status of :func:`check_targets`.
    """
    parser = argparse.ArgumentParser(prog="python -m moe_core.testing.compile", description=__doc__.partition("\n")[0])
    parser.add_argument("targets", nargs="+", metavar="target", help="sm80, sm89, sm90, sm100, sm120, gfx942, gfx950")
    parser.add_argument("--package", action="append", help="compile its backends (default: core and its plug-ins)")
    parser.add_argument("--examples", metavar="MODULE:FUNCTION", help="yields further examples for a device")
    parser.add_argument("--only", default="", help="examples whose name contains this text")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    options = parser.parse_args(arguments)

    def examples_of(device: DeviceInfo) -> Iterator[Example]:
        found: Iterable[Example] = backend_examples(device, options.package or plugin_packages())
        if options.examples:
            try:
                further = pkgutil.resolve_name(options.examples)
            except (ImportError, AttributeError, ValueError) as error:
                raise ConfigError(f"--examples {options.examples!r} cannot be loaded: {error}") from error
            found = itertools.chain(further(device), found)
        return (example for example in found if options.only in example.name)

    return check_targets(options.targets, examples_of, jobs=max(options.jobs, 1))


if __name__ == "__main__":
    sys.exit(main())
