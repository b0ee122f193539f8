"""On a GPU if there is one, else through Triton's interpreter."""

from __future__ import annotations

from moe_core.testing import ConformanceTests
from moe_fp8.experts.triton_mxfp8 import TritonMxfp8Experts


class TestTritonMxfp8(ConformanceTests):
    experts = TritonMxfp8Experts
    interpreted_every = 5
