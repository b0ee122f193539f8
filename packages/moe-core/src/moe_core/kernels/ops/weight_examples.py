"""Example launches of the weight quantizers, for the compile check of every target."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from moe_core.kernels.launch.example import Specimen
from moe_core.kernels.ops.quantize_weights import quantize_weights
from moe_core.spec.device import DeviceInfo
from moe_core.spec.quant_key import (
    kFp8Static128BlockE8M0Sym,
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
    kInt8StaticChannelSym,
    kInt8StaticTensorSym,
    kMxfp4Static,
    kMxfp8Static,
)


def specimens(target: DeviceInfo) -> Iterator[Specimen]:
    """Yield launches for the experts of DeepSeek-V3 and for odd sizes.

    Args:
        target: The device to compile for.

    Returns:
        The launches that the target supports.
    """
    keys = {"int8 channel": kInt8StaticChannelSym, "int8 tensor": kInt8StaticTensorSym}
    if target.kind == "hip" or target.capability >= 89:  # e4m3 conversions
        keys |= {
            "e4m3 tensor": kFp8StaticTensorSym,
            "e4m3 channel": kFp8StaticChannelSym,
            "e4m3 128x128": kFp8Static128BlockSym,
            "e4m3 128x128 e8m0": kFp8Static128BlockE8M0Sym,
            "e4m3 64x64": kFp8Static128BlockSym.with_group(64, 64),
            "mxfp8": kMxfp8Static,
        }
    keys["mxfp4"] = kMxfp4Static
    for name, key in keys.items():
        for rows, cols in ((4096, 7168), (7168, 2048), (2 * 139, 173)):
            if key == kMxfp4Static and cols % 32:
                continue
            w = torch.empty(256, rows, cols, dtype=torch.bfloat16, device="meta")
            yield Specimen(
                f"quantize weights {name} {rows}x{cols}",
                partial(quantize_weights, w, key, parts=2, backend="triton"),
                # sm120, Triton 3.6: blocks whose columns are loaded one by one spill 48 bytes
                max_spills=64 if cols % 16 else 0,
            )
