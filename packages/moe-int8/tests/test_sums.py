"""Layers whose sums int32 may not hold are refused."""

from __future__ import annotations

import pytest
from moe_core import FusedMoEConfig
from moe_core.spec.device import DeviceInfo
from moe_core.spec.environment import Environment
from moe_core.spec.quant_key import (
    kInt4W4A8StaticChannelSym,
    kInt4W4A8StaticGroup128Sym,
    kInt8DynamicTokenAsym,
    kInt8DynamicTokenSym,
    kInt8StaticChannelSym,
)
from moe_int8.experts.triton import TritonInt8Experts
from moe_int8.experts.triton_w4a8 import TritonW4A8Int8Experts


@pytest.mark.parametrize(
    ("experts", "weight_key"),
    [(TritonInt8Experts, kInt8StaticChannelSym), (TritonW4A8Int8Experts, kInt4W4A8StaticChannelSym)],
)
@pytest.mark.parametrize(("key", "longest"), [(kInt8DynamicTokenSym, 131071), (kInt8DynamicTokenAsym, 65793)])
def test_the_longest_sum(experts, weight_key, key, longest):
    for size, fits in ((longest, True), (longest + 1, False)):
        config = FusedMoEConfig(num_experts=2, top_k=1, hidden_size=size, intermediate_size=64)
        where = {"device": DeviceInfo.parse("sm90"), "environment": Environment.current()}
        accepted, reason = experts.is_supported_config(config, weight_key, key, **where)
        assert accepted is fits
        assert fits or (f"hidden_size to be at most {longest}" in reason and str(size) in reason)


def test_sums_of_groups_are_short():
    config = FusedMoEConfig(num_experts=2, top_k=1, hidden_size=2**20, intermediate_size=128)
    where = {"device": DeviceInfo.parse("sm90"), "environment": Environment.current()}
    keys = (kInt4W4A8StaticGroup128Sym, kInt8DynamicTokenAsym)
    assert TritonW4A8Int8Experts.is_supported_config(config, *keys, **where) == (True, None)
