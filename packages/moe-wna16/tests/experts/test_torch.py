from __future__ import annotations

from moe_core.testing import ConformanceTests
from moe_wna16.experts.torch import TorchWNA16Experts


class TestTorchWNA16(ConformanceTests):
    experts = TorchWNA16Experts
