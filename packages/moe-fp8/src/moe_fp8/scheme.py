"""What this package registers with moe-core (entry point ``moe_core.schemes``)."""

from __future__ import annotations

from pathlib import Path

from moe_core import Scheme

from moe_fp8.formats.fp8_block import Fp8BlockFormat
from moe_fp8.oracle import Fp8Oracle


def _quickstart(folder: Path) -> None:
    from moe_fp8.quickstart import write_checkpoint

    write_checkpoint(folder)


SCHEME = Scheme(
    name="fp8",
    protocol=1,
    oracle=Fp8Oracle,
    formats=(Fp8BlockFormat,),
    quant_methods=("fp8",),
    quickstart=_quickstart,
)
