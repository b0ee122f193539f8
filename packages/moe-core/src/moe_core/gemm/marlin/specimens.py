"""Launches of the family beside its layers: what puts words in order."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from moe_core.device import DeviceInfo
from moe_core.jit.specimen import Specimen


def specimens(target: DeviceInfo) -> Iterator[Specimen]:
    """The order of words."""
    if target.kind != "cuda" or target.capability < 80:
        return
    for bits, order in ((4, "integers"), (8, "integers"), (4, "e2m1"), (4, "e4m3")):
        for interleaved in (False, True):
            name = f"marlin words {bits} bits {order}{' interleaved' * interleaved}"
            yield Specimen(name, partial(_order, bits, order, interleaved))


def _order(bits: int, order: str, interleaved: bool) -> None:
    from moe_core.gemm.marlin.words import order_words

    codes = torch.empty(8, 4096, 2048 * bits // 8, dtype=torch.uint8, device="meta")
    order_words(codes, 2048, bits, order=order, interleaved=interleaved, backend="triton")
