"""What this package registers with moe-core (entry point ``moe_core.schemes``)."""

from __future__ import annotations

from pathlib import Path

from moe_core import Scheme

from moe_fp8.formats.compressed_tensors import CompressedTensorsFp8Format
from moe_fp8.formats.fp8_block import Fp8BlockFormat
from moe_fp8.formats.fp8_tensor import Fp8TensorFormat
from moe_fp8.formats.modelopt import ModelOptFp8Format
from moe_fp8.formats.mxfp8 import AutoRoundMxfp8Format, Mxfp8Format
from moe_fp8.formats.quark import QuarkFp8Format
from moe_fp8.online import ONLINE
from moe_fp8.oracle import Fp8Oracle


def _quickstart(folder: Path) -> None:
    from moe_fp8.quickstart import write_checkpoint

    write_checkpoint(folder)


SCHEME = Scheme(
    name="fp8",
    protocol=2,
    oracle=Fp8Oracle,
    formats=(
        Fp8BlockFormat,
        Fp8TensorFormat,
        CompressedTensorsFp8Format,
        ModelOptFp8Format,
        Mxfp8Format,
        AutoRoundMxfp8Format,
        QuarkFp8Format,
    ),
    quant_methods=("fp8", "compressed-tensors", "modelopt", "mxfp8", "auto-round", "quark"),
    quickstart=_quickstart,
    online=ONLINE,
)
