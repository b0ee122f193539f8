"""What a module with kernels says of its launches, so that they can be compiled without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Specimen:
    """One launch to compile.

    ``launch`` calls host code that starts kernels, on tensors of device "meta"; it must not read their values.
    ``max_spills``: bytes of local memory per thread that are accepted, with a comment where that isn't 0.
    """

    name: str
    launch: Callable[[], object]
    max_spills: int = 0
