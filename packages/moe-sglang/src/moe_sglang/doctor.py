"""Report of ``moe doctor``: whether SGLang would use the experts, and which."""

from __future__ import annotations

from moe_sglang.engine import ENGINE

#: common weights and activations of each scheme, by the names of their keys
USUAL = {
    "fp8": (
        ("kFp8Static128BlockSym", "kFp8Dynamic128Sym"),
        ("kFp8StaticChannelSym", "kFp8DynamicTokenSym"),
        ("kFp8StaticTensorSym", "kFp8StaticTensorSym"),
    ),
    "int8": (("kInt8StaticChannelSym", "kInt8DynamicTokenSym"),),
}


def lines() -> list[str]:
    """Return a line on the plug-in, then one per weight type: its backend here, or why none.

    Group-quantized weights are not listed. Their backend must read SGLang's codes in place, which depends on the
    layer's tensors.
    """
    return ENGINE.report(USUAL)
