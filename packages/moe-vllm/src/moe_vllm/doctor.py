"""What ``moe doctor`` says of this package: whether vLLM would get the experts, and which for usual layers."""

from __future__ import annotations

from moe_core import FusedMoEConfig, MoEError, QuantKey, SelectionError, as_quant_key
from moe_core.engine_api import select_kernel

from moe_vllm.engine import ENGINE

#: usual weights and activations of each scheme, by the names of their keys
_USUAL = {
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
    try:
        schemes, text = ENGINE.status()
    except MoEError as error:
        return [error.message]
    config = FusedMoEConfig(num_experts=128, top_k=8, hidden_size=2048, intermediate_size=768)
    said = [text]
    for scheme in schemes:
        for weights, activations in _USUAL[scheme]:
            found = _found(scheme, config, as_quant_key(weights), as_quant_key(activations))
            said.append(f"{scheme} {weights} x {activations or '16-bit'}: {found}")
    return said


def _found(scheme: str, config: FusedMoEConfig, weight_key: QuantKey | None, activation_key: QuantKey | None) -> str:
    try:
        selection = select_kernel(scheme, config, weight_key, activation_key)
    except SelectionError as error:
        return f"left to vLLM, {error.message.partition(': ')[2]}"
    if not selection.report.device.is_gpu:
        return "left to vLLM, torch sees no GPU"
    return f"{selection.backend} ({selection.experts.__name__})"
