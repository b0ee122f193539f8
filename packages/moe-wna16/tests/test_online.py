"""INT4 and INT8 in groups made of 16-bit experts, at load."""

from __future__ import annotations

import moe_wna16
import pytest
import torch
from moe_core import FusedMoEConfig, MoEWeights
from moe_core.reference.quantization import dequantize_weight
from moe_kit.online import OnlineTests
from moe_wna16.online import ONLINE
from torch import Tensor


class TestWNA16(OnlineTests):
    scheme = "wna16"


def rounding(weights: MoEWeights, found: MoEWeights) -> tuple[Tensor, Tensor]:
    """How far each weight of w2 is from the nearest code's value, and the scale of its group, in float64."""
    assert found.weight_key is not None
    assert found.w2_scale is not None
    assert found.w2_scale.dtype is torch.bfloat16
    cols = weights.w2.shape[2]
    values = dequantize_weight(
        found.w2, found.w2_scale, found.weight_key, zero_point=found.w2_zero_point, cols=cols, dtype=torch.float64
    )
    group = cols if found.weight_key.group_size == -1 else found.weight_key.group_size
    scale = found.w2_scale.double().repeat_interleave(group, dim=2)[:, :, :cols]
    # a bfloat16 scale may be smaller than the largest weight / the largest code, by half a step of 2**-8: that weight
    # saturates, and is off by as much of itself
    slack = scale * (found.weight_key.dtype.max_value + 1) * 2.0**-8
    return (values - weights.w2.double()).abs() - slack, scale


def test_a_short_last_group() -> None:
    """96 columns in groups of 64: the rest is a group of its own."""
    generator = torch.Generator().manual_seed(3)
    plain = MoEWeights(
        weight_key=None,
        activation_key=None,
        w13=torch.randn(2, 80, 96, generator=generator).bfloat16(),
        w2=torch.randn(2, 96, 40, generator=generator).bfloat16(),
    )
    for name in ("int4_g64", "int4_g64_asym", "int8_g64"):
        found = moe_wna16.quantize_moe_weights(plain, name)
        found.validate(FusedMoEConfig(2, 1, 96, 40), values=True)
        assert found.w13_scale is not None
        assert tuple(found.w13_scale.shape) == (2, 80, 2)
        error, scale = rounding(plain, found)
        assert bool((error <= scale / 2).all())


@pytest.mark.parametrize("name", [online.name for online in ONLINE])
def test_codes_are_the_nearest(name: str) -> None:
    plain = TestWNA16.sixteen_bit()
    error, scale = rounding(plain, moe_wna16.quantize_moe_weights(plain, name))
    assert bool((error <= scale / 2).all())
