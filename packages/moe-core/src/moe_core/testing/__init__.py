"""Testing tools for this project and for packages that extend it.

- :mod:`moe_core.testing.conformance`: the conformance kit, which tests every claim of an experts class
- :mod:`moe_core.reference.tolerance`: allowed error compared with the float64 reference, and its derivation
- :mod:`moe_core.testing.mistakes`: names the common mistake that explains a wrong result
- :mod:`moe_core.testing.data`: random weights, inputs and routing for any layer and keys
- :mod:`moe_core.testing.checkpoints`: small checkpoints with exact values, for tests of formats
- :mod:`moe_core.testing.compile`: compiles Triton kernels for GPUs that are not installed
- :mod:`moe_core.testing.interpreter`: a faster Triton interpreter
- :mod:`moe_core.testing.plugin`: the pytest plugin
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_core.reference.tolerance import Expected, expected_output
    from moe_core.testing.cases import Case, conformance_cases
    from moe_core.testing.conformance import ConformanceTests, cases_for, run_case
    from moe_core.testing.data import Inputs, make_inputs, make_weights
    from moe_core.testing.launches import Example

_HOME_OF = {
    "Case": "moe_core.testing.cases",
    "ConformanceTests": "moe_core.testing.conformance",
    "Example": "moe_core.testing.launches",
    "Expected": "moe_core.reference.tolerance",
    "Inputs": "moe_core.testing.data",
    "cases_for": "moe_core.testing.conformance",
    "conformance_cases": "moe_core.testing.cases",
    "expected_output": "moe_core.reference.tolerance",
    "make_inputs": "moe_core.testing.data",
    "make_weights": "moe_core.testing.data",
    "run_case": "moe_core.testing.conformance",
}


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(importlib.import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Case",
    "ConformanceTests",
    "Example",
    "Expected",
    "Inputs",
    "cases_for",
    "conformance_cases",
    "expected_output",
    "make_inputs",
    "make_weights",
    "run_case",
]
