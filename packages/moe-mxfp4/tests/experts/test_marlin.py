"""On a GPU if there is one, else through Triton's interpreter."""

from __future__ import annotations

from moe_core.testing import ConformanceTests
from moe_mxfp4.experts.marlin import BatchedMarlinMxfp4Experts, MarlinMxfp4Experts


class TestMarlinMxfp4(ConformanceTests):
    experts = MarlinMxfp4Experts
    interpreted_every = 2


class TestBatchedMarlinMxfp4(ConformanceTests):
    experts = BatchedMarlinMxfp4Experts
    interpreted_every = 6
