"""On a GPU if there is one, else through Triton's interpreter."""

from __future__ import annotations

from moe_core.testing import ConformanceTests
from moe_int8.experts.marlin_w4a8 import MarlinW4A8Int8Experts
from moe_int8.experts.triton import TritonInt8Experts
from moe_int8.experts.triton_w4a8 import TritonW4A8Int8Experts
from moe_int8.experts.triton_weight_only import TritonInt8WeightOnlyExperts


class TestTritonInt8(ConformanceTests):
    experts = TritonInt8Experts
    interpreted_every = 5


class TestTritonInt8WeightOnly(ConformanceTests):
    experts = TritonInt8WeightOnlyExperts
    interpreted_every = 5


class TestTritonW4A8Int8(ConformanceTests):
    experts = TritonW4A8Int8Experts
    interpreted_every = 4


class TestMarlinW4A8Int8(ConformanceTests):
    experts = MarlinW4A8Int8Experts
    interpreted_every = 5
