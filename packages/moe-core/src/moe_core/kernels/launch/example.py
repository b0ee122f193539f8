"""Example launches of a module with kernels, so that they can be compiled without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Specimen:
    """One example launch to compile.

    Attributes:
        name: Name of the launch.
        launch: Host code that launches kernels on meta tensors; it must not read their values.
        max_spills: Accepted bytes of local memory per thread. Values other than 0 need a comment with the reason.
    """

    name: str
    launch: Callable[[], object]
    max_spills: int = 0
