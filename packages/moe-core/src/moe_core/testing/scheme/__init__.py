"""What every scheme must do, as tests of its package: the scheme's name is all that most of them need.

    class TestKnownFaults(KnownFaultTests):
        scheme = "mine"
        keys = ((kMine, None), (kMine, kFp8DynamicTokenSym))

The rest comes from the registry: experts and their claims from the oracle.  Needs pytest
(``pip install 'moe-core[testing]'``).
"""

from moe_core.testing.scheme.known_faults import KnownFaultTests

__all__ = ["KnownFaultTests"]
