"""On a GPU if there is one, else through Triton's interpreter."""

from __future__ import annotations

from moe_core.testing import ConformanceTests
from moe_mxfp4.experts.triton import TritonMxfp4Experts


class TestTritonMxfp4(ConformanceTests):
    experts = TritonMxfp4Experts
    interpreted_every = 2
