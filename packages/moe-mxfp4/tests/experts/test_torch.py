from __future__ import annotations

from moe_core.testing import ConformanceTests
from moe_mxfp4.experts.torch import TorchMxfp4Experts


class TestTorchMxfp4(ConformanceTests):
    experts = TorchMxfp4Experts
