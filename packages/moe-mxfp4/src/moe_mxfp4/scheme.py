"""What this package registers with moe-core (entry point ``moe_core.schemes``)."""

from __future__ import annotations

from pathlib import Path

from moe_core import Scheme

from moe_mxfp4.formats.auto_round import AutoRoundMxfp4Format
from moe_mxfp4.formats.compressed_tensors import CompressedTensorsMxfp4Format
from moe_mxfp4.formats.gpt_oss import GptOssMxfp4Format
from moe_mxfp4.formats.modelopt import ModelOptMxfp4Format
from moe_mxfp4.formats.quark import QuarkMxfp4Format
from moe_mxfp4.online import ONLINE
from moe_mxfp4.oracle import Mxfp4Oracle


def _quickstart(folder: Path) -> None:
    from moe_mxfp4.quickstart import write_checkpoint

    write_checkpoint(folder)


SCHEME = Scheme(
    name="mxfp4",
    protocol=2,
    oracle=Mxfp4Oracle,
    formats=(
        GptOssMxfp4Format,
        CompressedTensorsMxfp4Format,
        QuarkMxfp4Format,
        ModelOptMxfp4Format,
        AutoRoundMxfp4Format,
    ),
    quant_methods=("mxfp4", "compressed-tensors", "modelopt", "quark", "auto-round", "intel/auto-round"),
    quickstart=_quickstart,
    online=ONLINE,
)
