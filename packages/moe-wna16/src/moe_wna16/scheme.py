"""What this package registers with moe-core (entry point ``moe_core.schemes``)."""

from __future__ import annotations

from moe_core import Scheme

from moe_wna16.oracle import WNA16Oracle

SCHEME = Scheme(name="wna16", protocol=1, oracle=WNA16Oracle)
