"""Test suites that every scheme package must pass; most tests only need the scheme's name.

    class TestOnline(OnlineTests):  # if the scheme quantizes 16-bit experts at load
        scheme = "mine"

    class TestKnownFaults(KnownFaultTests):
        scheme = "mine"
        keys = ((kMine, None), (kMine, kFp8DynamicTokenSym))

Everything else comes from the registry: experts and their claims from the oracle, a checkpoint from
``Scheme.quickstart``, quantization at load from ``Scheme.online``. pytest is required (``pip install
'moe-core[testing]'``).
"""

from moe_core.testing.scheme.known_faults import KnownFaultTests
from moe_core.testing.scheme.online import OnlineTests

__all__ = ["KnownFaultTests", "OnlineTests"]
