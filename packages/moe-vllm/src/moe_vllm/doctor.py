"""Report of ``moe doctor``: whether vLLM would use the experts, and which for common layers."""

from __future__ import annotations

from moe_vllm.engine import ENGINE

#: common weights and activations of each scheme, by the names of their keys
USUAL = {
    "fp8": (
        ("kFp8Static128BlockSym", "kFp8Dynamic128Sym"),
        ("kFp8StaticChannelSym", "kFp8DynamicTokenSym"),
        ("kFp8StaticTensorSym", "kFp8StaticTensorSym"),
        ("kMxfp8Static", "kMxfp8Dynamic"),
    ),
    "int8": (("kInt8StaticChannelSym", "kInt8DynamicTokenSym"),),
    "mxfp4": (("kMxfp4Static", None),),
    "wna16": (("kInt4Static", None), ("kInt8Static", None)),
}


def lines() -> list[str]:
    """Return a line on the plug-in, then one per weight type: its backend here, or why none."""
    return ENGINE.report(USUAL)
