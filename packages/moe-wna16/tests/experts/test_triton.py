"""On a GPU if there is one, else through Triton's interpreter."""

from __future__ import annotations

from moe_core.testing import ConformanceTests
from moe_wna16.experts.triton import TritonWNA16Experts


class TestTritonWNA16(ConformanceTests):
    experts = TritonWNA16Experts
    interpreted_every = 6
