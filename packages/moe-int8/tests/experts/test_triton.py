"""On a GPU if there is one, else through Triton's interpreter."""

from __future__ import annotations

from moe_core.testing import ConformanceTests
from moe_int8.experts.triton import TritonInt8Experts


class TestTritonInt8(ConformanceTests):
    experts = TritonInt8Experts
