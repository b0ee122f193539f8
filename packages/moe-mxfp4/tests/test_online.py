"""MXFP4 made of 16-bit experts of gpt-oss, at load."""

from __future__ import annotations

import moe_mxfp4
import torch
from moe_core import FusedMoEConfig, MoEWeights, kMxfp4Static
from moe_core.quantization import dequantize_weight
from moe_core.testing.scheme import OnlineTests


class TestMxfp4(OnlineTests):
    scheme = "mxfp4"
    gpt_oss = True


def test_no_weight_saturates() -> None:
    """Each is within half a step of its code: a step is half the scale below 1, a quarter of the power of two above."""
    plain = TestMxfp4.sixteen_bit()
    found = moe_mxfp4.quantize_moe_weights(plain)
    assert found.w2_scale is not None
    values = dequantize_weight(found.w2, found.w2_scale, kMxfp4Static, dtype=torch.float64)
    scale = torch.exp2(found.w2_scale.double() - 127).repeat_interleave(32, dim=2)
    quotient = plain.w2.double().abs() / scale
    assert bool((quotient <= 6).all())
    step = torch.where(quotient < 2, 0.5, torch.where(quotient < 4, 1.0, 2.0)) * scale
    assert bool(((values - plain.w2.double()).abs() <= step / 2).all())
    # a scale twice as small would let the largest of a group saturate
    assert bool((quotient.unflatten(2, (-1, 32)).amax(dim=3) > 3).all())


def test_a_short_last_group() -> None:
    """80 columns: the last 16 are a group of their own."""
    generator = torch.Generator().manual_seed(3)
    plain = MoEWeights(
        weight_key=None,
        activation_key=None,
        w13=torch.randn(2, 96, 80, generator=generator).bfloat16(),
        w2=torch.randn(2, 80, 48, generator=generator).bfloat16(),
    )
    found = moe_mxfp4.quantize_moe_weights(plain)
    found.validate(FusedMoEConfig(2, 1, 80, 48), values=True)
    assert found.w13_scale is not None
    assert tuple(found.w13.shape) == (2, 96, 40)
    assert tuple(found.w13_scale.shape) == (2, 96, 3)
