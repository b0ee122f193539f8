"""MXFP4 made of 16-bit experts of gpt-oss, at load."""

from __future__ import annotations

import moe_mxfp4
import torch
from moe_core import FusedMoEConfig, MoEWeights, kMxfp4Static
from moe_core.reference.quantization import dequantize_weight
from moe_kit.online import OnlineTests
from torch import Tensor


class TestMxfp4(OnlineTests):
    scheme = "mxfp4"
    gpt_oss = True


def quotients(w: Tensor, codes: Tensor, stored: Tensor | None) -> Tensor:
    """Magnitudes of ``w`` over its groups' scales; each is within half a step of its code.

    A step is half the scale below 2, the scale below 4, twice the scale above.
    """
    assert stored is not None
    values = dequantize_weight(codes, stored, kMxfp4Static, cols=w.shape[2], dtype=torch.float64)
    scale = torch.exp2(stored.double() - 127).repeat_interleave(32, dim=2)[:, :, : w.shape[2]]
    quotient = w.double().abs() / scale
    assert bool((quotient <= 6).all())
    step = torch.where(quotient < 2, 0.5, torch.where(quotient < 4, 1.0, 2.0)) * scale
    assert bool(((values - w.double()).abs() <= step / 2).all())
    return quotient


def test_no_weight_saturates() -> None:
    plain = TestMxfp4.sixteen_bit()
    found = moe_mxfp4.quantize_moe_weights(plain)
    quotient = quotients(plain.w2, found.w2, found.w2_scale)
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
    assert tuple(found.w13_scale.shape) == (2, 96, 3)
    quotient = quotients(plain.w13, found.w13, found.w13_scale)
    # the last scale is that of the 16 columns
    assert bool((quotient[:, :, 64:].amax(dim=2) > 3).all())
