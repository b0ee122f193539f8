"""On a GPU if there is one, else through Triton's interpreter."""

from __future__ import annotations

from moe_core.testing import ConformanceTests
from moe_fp8.experts.marlin import BatchedMarlinFp8Experts, MarlinFp8Experts, MarlinFp8QdqExperts


class TestMarlinFp8(ConformanceTests):
    experts = MarlinFp8Experts
    interpreted_every = 3


class TestBatchedMarlinFp8(ConformanceTests):
    experts = BatchedMarlinFp8Experts
    interpreted_every = 8


class TestMarlinFp8Qdq(ConformanceTests):
    experts = MarlinFp8QdqExperts
    interpreted_every = 5
