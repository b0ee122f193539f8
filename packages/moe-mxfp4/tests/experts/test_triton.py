"""On a GPU if there is one, else through Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import triton
from moe_core import kMxfp4Static, kMxfp8Dynamic
from moe_core.testing import ConformanceTests
from moe_mxfp4.experts.triton import TritonMxfp4Experts


class TestTritonMxfp4(ConformanceTests):
    experts = TritonMxfp4Experts
    interpreted_every = 6


class ScaledMxfp4Experts(TritonMxfp4Experts):
    """Codes multiplied with their scales, on devices too whose tensor cores do not: there Triton widens them."""

    claims = replace(TritonMxfp4Experts.claims, keys=((kMxfp4Static, kMxfp8Dynamic),))
    scaled = True


@pytest.mark.skipif(
    bool(triton.knobs.runtime.interpret) and not hasattr(triton.runtime.interpreter, "_e2m1_to_f32"),
    reason="this Triton's interpreter has no dot_scaled (that of 3.9 has)",
)
class TestScaledMxfp4(ConformanceTests):
    experts = ScaledMxfp4Experts
    interpreted_every = 6
