"""On a GPU if there is one, else through Triton's interpreter."""

from __future__ import annotations

from moe_core.testing import ConformanceTests
from moe_fp8.experts.triton_weight_only import TritonFp8WeightOnlyExperts


class TestTritonFp8WeightOnly(ConformanceTests):
    experts = TritonFp8WeightOnlyExperts
    interpreted_every = 2
