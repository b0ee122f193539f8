"""Every claim of the scheme's experts."""

from __future__ import annotations

from moe_core.testing import ConformanceTests


class TestTorch(ConformanceTests):
    experts = "example_scheme:PlainTorchExperts"
