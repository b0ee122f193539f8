"""On a GPU if there is one, else through Triton's interpreter."""

from __future__ import annotations

from moe_core.testing import ConformanceTests
from moe_fp8.experts.triton import TritonFp8BlockExperts


class TestTritonFp8Block(ConformanceTests):
    experts = TritonFp8BlockExperts
    interpreted_every = 5
