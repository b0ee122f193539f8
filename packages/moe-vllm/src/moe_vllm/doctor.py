"""What ``moe doctor`` says of this package: whether vLLM would get the experts, and which for usual layers."""

from __future__ import annotations

from moe_vllm.engine import ENGINE

#: usual weights and activations of each scheme, by the names of their keys
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
    """One line on the plug-in, then one for each kind of weights: the backend on this machine's device, or why none."""
    return ENGINE.report(USUAL)
