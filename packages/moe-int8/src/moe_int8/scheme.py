"""What this package registers with moe-core (entry point ``moe_core.schemes``)."""

from __future__ import annotations

from moe_core import Scheme

from moe_int8.online import ONLINE
from moe_int8.oracle import Int8Oracle

SCHEME = Scheme(
    name="int8",
    protocol=1,
    oracle=Int8Oracle,
    online=ONLINE,
)
