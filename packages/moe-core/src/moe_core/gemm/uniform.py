"""Products that are summed alike for every height of a tile.

Device functions read `FEW`, the rows of activations up to which the product of a step has registers of its own.  Their
copies here have none: the tensor cores' sum runs on.
"""

from __future__ import annotations

from typing import Any

from moe_core.gemm.swap_ab import add_swap_ab_dot
from moe_core.jit.specialize import specialize

_COPIES: dict[Any, Any] = {}


def uniform(multiply: Any) -> Any:
    """``multiply`` of a tile kernel, or its copy that sums alike for every tile."""
    function = multiply.fn
    if function not in _COPIES:
        read = function.__code__.co_names
        if "FEW" in read:
            _COPIES[function] = specialize(multiply, FEW=0)
        elif "add_swap_ab_dot" in read:
            _COPIES[function] = specialize(multiply, add_swap_ab_dot=specialize(add_swap_ab_dot, FEW=0))
        else:
            _COPIES[function] = multiply
    return _COPIES[function]
