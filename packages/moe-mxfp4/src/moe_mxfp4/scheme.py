"""What this package registers with moe-core (entry point ``moe_core.schemes``)."""

from __future__ import annotations

from moe_core import Scheme

from moe_mxfp4.oracle import Mxfp4Oracle

SCHEME = Scheme(
    name="mxfp4",
    protocol=1,
    oracle=Mxfp4Oracle,
    formats=(),
    quant_methods=("mxfp4", "compressed-tensors", "modelopt", "quark", "auto-round"),
)
