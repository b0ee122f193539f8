"""What ``moe doctor`` says of this package: whether SGLang would get the experts, and which for usual layers."""

from __future__ import annotations

from moe_sglang.engine import ENGINE

#: usual weights and activations of each scheme, by the names of their keys
USUAL = {
    "fp8": (
        ("kFp8Static128BlockSym", "kFp8Dynamic128Sym"),
        ("kFp8StaticChannelSym", "kFp8DynamicTokenSym"),
        ("kFp8StaticTensorSym", "kFp8StaticTensorSym"),
    ),
    "int8": (("kInt8StaticChannelSym", "kInt8DynamicTokenSym"),),
}


def lines() -> list[str]:
    """One line on the plug-in, then one for each kind of weights: the backend on this machine's device, or why none.

    Weights in groups are not listed: of their kernels those are taken that read SGLang's codes where they lie, which a
    layer's own tensors show.
    """
    return ENGINE.report(USUAL)
