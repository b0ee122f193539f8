"""On a GPU if there is one, else through Triton's interpreter."""

from __future__ import annotations

from moe_core.testing import ConformanceTests
from moe_fp8.experts.triton_scaled_mm import TritonFp8Experts


class TestTritonFp8(ConformanceTests):
    experts = TritonFp8Experts
    interpreted_every = 5
