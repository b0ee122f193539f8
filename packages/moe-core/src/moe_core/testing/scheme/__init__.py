"""What every scheme must do, as tests of its package: the scheme's name is all that most of them need.

    class TestOnline(OnlineTests):  # where the scheme quantises 16-bit experts at load
        scheme = "mine"

    class TestKnownFaults(KnownFaultTests):
        scheme = "mine"
        keys = ((kMine, None), (kMine, kFp8DynamicTokenSym))

The rest comes from the registry: experts and their claims from the oracle, a checkpoint from ``Scheme.quickstart``,
what is quantised at load from ``Scheme.online``.  Needs pytest (``pip install 'moe-core[testing]'``).
"""

from moe_core.testing.scheme.known_faults import KnownFaultTests
from moe_core.testing.scheme.online import OnlineTests

__all__ = ["KnownFaultTests", "OnlineTests"]
