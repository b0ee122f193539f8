"""Record the kernel launches of examples, to compile them for GPUs that are not installed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from moe_core.kernels.launch.compile_target import Target, launching
from moe_core.kernels.launch.describe import Value, describe
from moe_core.kernels.launch.launch import record


@dataclass(frozen=True)
class Example:
    """Host code that launches kernels to compile.

    Attributes:
        name: Name of the example.
        launch: Launches kernels on meta tensors; it must not read their values.
        max_spills: Accepted bytes of local memory per thread. Values other than 0 need a comment with the reason.
    """

    name: str
    launch: Callable[[], object]
    max_spills: int = 0


@dataclass(frozen=True, eq=False)
class Compilation:
    """One kernel to compile for one target.

    Attributes:
        example: Name of the example that launches it.
        target: The target.
        kernel: The Triton kernel.
        arguments: Positional arguments of the launch.
        options: Keyword arguments of the launch, with compiler options.
        max_spills: Accepted bytes of local memory per thread.
        values: Values that it is compiled for.
    """

    example: str
    target: Target
    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    max_spills: int
    values: frozenset[Value]

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return str(self.kernel.__name__)

    @property
    def arch(self) -> str:
        """Architecture of the target."""
        return self.target.device.arch


def launches_of(example: Example, target: Target) -> list[Compilation]:
    """Record the launches of an example.

    Args:
        example: The example.
        target: Target that its kernels would be compiled for.

    Returns:
        One compilation per launch.
    """
    found: list[Compilation] = []

    def add(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        values = describe(kernel, arguments, options)
        found.append(Compilation(example.name, target, kernel, arguments, options, example.max_spills, values))

    with launching(target, add), record() as recorded:
        example.launch()
    for one in recorded:
        add(one.kernel, tuple(one.arguments.values()), one.options)
    return found


def distinct_launches(examples: Iterable[Example], target: Target) -> tuple[list[Compilation], list[str]]:
    """Record the distinct launches of examples.

    Args:
        examples: The examples.
        target: Target that the kernels would be compiled for.

    Returns:
        (compilations, descriptions of the problems). Of equal launches, the one that accepts the fewest spills is kept.
    """
    found: dict[tuple[str, frozenset[Value]], Compilation] = {}
    problems = []
    for example in examples:
        where = f"{target.device.arch}: {example.name}"
        try:
            launches = launches_of(example, target)
        except Exception as error:
            problems.append(f"{where}: cannot be launched: {type(error).__name__}: {error}")
            continue
        if not launches:
            problems.append(f"{where}: started no kernel")
        for one in launches:
            key = one.name, one.values
            if key not in found or one.max_spills < found[key].max_spills:
                found[key] = one
    return list(found.values()), problems
