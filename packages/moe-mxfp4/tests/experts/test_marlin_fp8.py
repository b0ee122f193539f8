"""On a GPU if there is one, else through Triton's interpreter."""

from __future__ import annotations

from moe_core.testing import ConformanceTests
from moe_mxfp4.experts.marlin_fp8 import MarlinMxfp4Fp8Experts


class TestMarlinMxfp4Fp8(ConformanceTests):
    experts = MarlinMxfp4Fp8Experts
    interpreted_every = 4
