"""What every scheme must do, of this one; and every claim of its experts."""

from __future__ import annotations

from moe_core.testing import ConformanceTests
from moe_core.testing.scheme import KnownFaultTests


class TestKnownFaults(KnownFaultTests):
    scheme = "plain"
    keys = ((None, None),)


class TestTorch(ConformanceTests):
    experts = "example_scheme:PlainTorchExperts"
