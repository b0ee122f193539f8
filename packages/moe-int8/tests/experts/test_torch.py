from __future__ import annotations

from moe_core.testing import ConformanceTests
from moe_int8.experts.torch import TorchInt8Experts


class TestTorchInt8(ConformanceTests):
    experts = TorchInt8Experts
