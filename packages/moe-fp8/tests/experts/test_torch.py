from __future__ import annotations

from moe_core.testing import ConformanceTests
from moe_fp8.experts.torch import TorchFp8Experts


class TestTorchFp8(ConformanceTests):
    experts = TorchFp8Experts
