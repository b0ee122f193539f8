"""Find asynchronous products in Triton's GPU code that outlive their loop iteration.

Such a product still reads registers that the next iteration overwrites.

See :mod:`moe_core.kernels.device.wait`. The patterns match the IR of Triton 3.6 to 3.9.
"""

from __future__ import annotations

import re

_PRODUCT = re.compile(r"\bttng\.warp_group_dot %.*\bisAsync = true.*\} : tensor<")
_WAIT = re.compile(r"\bttng\.warp_group_dot_wait\b.*pendings = (\d+)")


def register_products_in_flight(ttgir: str) -> int:
    """Count products with register operands that may be in flight at a loop's next iteration.

    The left operand of such a product is in registers.

    Args:
        ttgir: TTGIR of a kernel.

    Returns:
        The largest number over all loops.
    """
    most = 0
    depth = 0
    #: for each enclosing loop: the brace depth outside of it, and its products in flight
    loops: list[tuple[int, int]] = []
    for line in ttgir.splitlines():
        wait = _WAIT.search(line)
        if "scf.for" in line:
            loops.append((depth, 0))
        elif loops and wait is not None:
            loops[-1] = (loops[-1][0], min(loops[-1][1], int(wait.group(1))))
        elif loops and _PRODUCT.search(line):
            loops[-1] = (loops[-1][0], loops[-1][1] + 1)
        depth += line.count("{") - line.count("}")
        if loops and depth <= loops[-1][0]:
            most = max(most, loops.pop()[1])
    return most
