"""What this package registers with moe-core (entry point ``moe_core.schemes``)."""

from __future__ import annotations

from pathlib import Path

from moe_core import Scheme

from moe_wna16.formats.auto_round import AutoRoundFormat
from moe_wna16.formats.awq import AwqFormat
from moe_wna16.formats.compressed_tensors import CompressedTensorsWNA16Format
from moe_wna16.formats.gptq import GptqFormat
from moe_wna16.formats.modelopt import ModelOptAwqFormat
from moe_wna16.online import ONLINE
from moe_wna16.oracle import WNA16Oracle


def _quickstart(folder: Path) -> None:
    from moe_wna16.quickstart import write_checkpoint

    write_checkpoint(folder)


SCHEME = Scheme(
    name="wna16",
    protocol=2,
    oracle=WNA16Oracle,
    formats=(GptqFormat, AwqFormat, AutoRoundFormat, CompressedTensorsWNA16Format, ModelOptAwqFormat),
    quant_methods=("gptq", "awq", "auto-round", "intel/auto-round", "compressed-tensors", "modelopt"),
    quickstart=_quickstart,
    online=ONLINE,
)
