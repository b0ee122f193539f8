"""Two launches are described alike where Triton compiles one kernel for both."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl
from moe_core.kernels.launch.describe import describe
from triton.language import constexpr


class Kernel:
    """Stands in for Triton's."""

    arg_names = ("x", "n", "B", "F", "rows")
    do_not_specialize = ("rows",)

    @staticmethod
    def fn(x=None, n=None, B: tl.constexpr = None, F: tl.constexpr = None, rows=None) -> None:
        """The kernel's function."""


def tiles() -> None: ...


def rows() -> None: ...


@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [
        (((torch.zeros(2), 32, 64), {}), ((torch.zeros(5), 48, 64), {}), True),  # sizes that are not specialized for
        (((torch.zeros(2), 32, 64), {}), ((torch.zeros(2), 33, 64), {}), False),
        (((torch.zeros(2), 1, 64), {}), ((torch.zeros(2), 33, 64), {}), False),
        (((torch.zeros(2), 32, 64), {}), ((torch.zeros(2).half(), 32, 64), {}), False),
        (((torch.zeros(2), 32, 64), {}), ((None, 32, 64), {}), False),
        (((torch.zeros(2), 32, 64), {}), ((torch.zeros(2), 32, 128), {}), False),
        (((torch.zeros(2), (32, constexpr(4)), 64), {}), ((torch.zeros(2), (48, constexpr(4)), 64), {}), True),
        (((torch.zeros(2), (32, constexpr(4)), 64), {}), ((torch.zeros(2), (32, constexpr(8)), 64), {}), False),
        (((torch.zeros(2), 32, 64), {}), ((torch.zeros(2), 32, 64), {"F": tiles}), False),
        (((torch.zeros(2), 32, 64), {}), ((torch.zeros(2), 32, 64), {"num_warps": 8}), False),
        ((((torch.zeros(2), 32), 1, 1), {}), (((torch.zeros(2), 64), 1, 1), {}), True),
        ((((torch.zeros(2), 32), 1, 1), {}), (((torch.zeros(2), 65), 1, 1), {}), False),
        ((((torch.zeros(2), tiles), 1, 1), {}), (((torch.zeros(2), rows), 1, 1), {}), False),
        (((torch.zeros(8)[4:], 1, 1), {}), ((torch.zeros(8)[1:], 1, 1), {}), False),  # 16 bytes from an aligned address
        (((torch.zeros(2), 2**31 + 1, 1), {}), ((torch.zeros(2), 3, 1), {}), False),
        (((torch.zeros(2), 1, 1), {"rows": 1}), ((torch.zeros(2), 1, 1), {"rows": 16}), True),
        (((torch.zeros(2), 1, 1), {"rows": 1}), ((torch.zeros(2), 1, 1), {"rows": 2**31}), False),
        ((((torch.zeros(2), tl.constexpr(2)), 1, 1), {}), (((torch.zeros(2), tl.constexpr(3)), 1, 1), {}), False),
    ],
)
def test_launches_are_equal_where_they_compile_the_same(first, second, equal) -> None:
    assert (describe(Kernel, *first) == describe(Kernel, *second)) is equal
