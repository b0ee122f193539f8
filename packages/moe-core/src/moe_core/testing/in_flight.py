"""Looks in Triton's GPU code for products that read registers longer than the step of the loop that filled them.

See :mod:`moe_core.kernels.device.wait`; the text is that of Triton 3.6 to 3.9.
"""

from __future__ import annotations

import re

_PRODUCT = re.compile(r"\bttng\.warp_group_dot %.*\bisAsync = true.*\} : tensor<")
_WAIT = re.compile(r"\bttng\.warp_group_dot_wait\b.*pendings = (\d+)")


def register_products_in_flight(ttgir: str) -> int:
    """How many products with a left operand in registers may still run when a loop's next step begins, at most."""
    most = 0
    depth = 0
    #: of each loop around: the depth outside, and its products in flight
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
