"""On a GPU if there is one, else through Triton's interpreter."""

from __future__ import annotations

from moe_core.testing import ConformanceTests
from moe_wna16.experts.marlin import BatchedMarlinWNA16Experts, MarlinWNA16Experts


class TestMarlinWNA16(ConformanceTests):
    experts = MarlinWNA16Experts
    interpreted_every = 3


class TestBatchedMarlinWNA16(ConformanceTests):
    experts = BatchedMarlinWNA16Experts
    interpreted_every = 8
