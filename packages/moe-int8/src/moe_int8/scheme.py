"""What this package registers with moe-core (entry point ``moe_core.schemes``)."""

from __future__ import annotations

from pathlib import Path

from moe_core import Scheme

from moe_int8.formats.compressed_tensors import CompressedTensorsInt8Format
from moe_int8.formats.modelopt import ModelOptInt8Format
from moe_int8.formats.quark import QuarkInt8Format
from moe_int8.online import ONLINE
from moe_int8.oracle import Int8Oracle


def _quickstart(folder: Path) -> None:
    from moe_int8.quickstart import write_checkpoint

    write_checkpoint(folder)


SCHEME = Scheme(
    name="int8",
    protocol=2,
    oracle=Int8Oracle,
    formats=(CompressedTensorsInt8Format, ModelOptInt8Format, QuarkInt8Format),
    quant_methods=("compressed-tensors", "modelopt", "quark"),
    quickstart=_quickstart,
    online=ONLINE,
)
