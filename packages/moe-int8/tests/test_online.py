"""INT8 made of 16-bit experts, at load."""

from __future__ import annotations

import moe_int8
import pytest
from moe_int8.online import ONLINE
from moe_kit.online import OnlineTests


class TestInt8(OnlineTests):
    scheme = "int8"


@pytest.mark.parametrize("name", [online.name for online in ONLINE])
def test_the_largest_value_of_a_channel_is_the_largest_code(name: str) -> None:
    found = moe_int8.quantize_moe_weights(TestInt8.sixteen_bit(), name)
    assert bool((found.w13.abs().amax(dim=2) == 127).all())
