"""The WNA16 scheme as data, registered with moe-core (entry point ``moe_core.schemes``)."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from moe_core import (
    UINT4,
    UINT4B8,
    UINT8,
    UINT8B128,
    Backend,
    QuantKey,
    SchemeSpec,
    WeightKind,
    kFp8DynamicTokenSym,
    kInt4Static,
)

from moe_wna16.online import ONLINE

if TYPE_CHECKING:
    from moe_core import FusedMoEConfig


class WNA16MoEBackend(StrEnum):
    """Backends of this package; the entry points of other packages name theirs."""

    MARLIN = "marlin"
    BATCHED_MARLIN = "batched_marlin"
    TRITON = "triton"
    HUMMING = "humming"
    FLASHINFER_TRTLLM = "flashinfer_trtllm"
    TORCH = "torch"


#: element types of weights, and whether they are symmetric (without zero points)
_SYMMETRIC = {UINT4B8: True, UINT8B128: True, UINT4: False, UINT8: False}


def _reason_against(config: FusedMoEConfig, weight_key: QuantKey | None, activation_key: QuantKey | None) -> str | None:
    if weight_key is None or weight_key.dtype not in _SYMMETRIC or weight_key.group_shape.row != 1:
        return (
            "the wna16 scheme reads weights of unsigned 4- or 8-bit codes in groups of a row's columns, "
            f"asked for {weight_key or '16-bit weights'}"
        )
    symmetric = _SYMMETRIC[weight_key.dtype]
    if weight_key.symmetric is not symmetric:
        return (
            f"codes of {weight_key.dtype.name} {'have no' if symmetric else 'need'} zero points, "
            f"the weight key is {weight_key}"
        )
    if activation_key is not None and (activation_key != kFp8DynamicTokenSym or weight_key.dtype != UINT4B8):
        return (
            "the wna16 scheme multiplies with 16-bit activations, and symmetric int4 weights with "
            f"{kFp8DynamicTokenSym}; asked for {weight_key} with {activation_key}"
        )
    return None


#: Scheme of unsigned 4- and 8-bit codes in groups along K, with 16-bit activations; int4 also with e4m3 activations.
SCHEME = SchemeSpec(
    name="wna16",
    interface_api=(1, 0),
    format_api=(1, 0),
    kernel_api=(1, 0),
    package="moe-wna16",
    backend_enum=WNA16MoEBackend,
    reason_against=_reason_against,
    weight_only=True,
    backends=(
        Backend(
            WNA16MoEBackend.FLASHINFER_TRTLLM.value,
            (
                "moe_wna16.experts.flashinfer_trtllm:TrtLlmMxint4ExpertsMonolithic",
                "moe_wna16.experts.flashinfer_trtllm:TrtLlmMxint4ExpertsModular",
            ),
        ),
        Backend(
            WNA16MoEBackend.MARLIN.value,
            ("moe_wna16.experts.marlin:MarlinWNA16Experts", "moe_wna16.experts.marlin:MarlinW4AFp8Experts"),
        ),
        Backend(
            WNA16MoEBackend.BATCHED_MARLIN.value,
            ("moe_wna16.experts.marlin:BatchedMarlinWNA16Experts",),
            aliases=(WNA16MoEBackend.MARLIN.value,),
        ),
        Backend(WNA16MoEBackend.TRITON.value, ("moe_wna16.experts.triton:TritonWNA16Experts",)),
        Backend(WNA16MoEBackend.HUMMING.value, ("moe_wna16.experts.humming:HummingWNA16Experts",)),
        Backend(WNA16MoEBackend.TORCH.value, ("moe_wna16.experts.torch:TorchWNA16Experts",)),
    ),
    formats=(
        "moe_wna16.formats.gptq:GptqFormat",
        "moe_wna16.formats.awq:AwqFormat",
        "moe_wna16.formats.auto_round:AutoRoundFormat",
        "moe_wna16.formats.compressed_tensors:CompressedTensorsWNA16Format",
        "moe_wna16.formats.modelopt:ModelOptAwqFormat",
    ),
    quant_methods=("gptq", "awq", "auto-round", "intel/auto-round", "compressed-tensors", "modelopt"),
    quickstart="moe_wna16.quickstart:MODEL.write",
    online=ONLINE,
    kinds=(WeightKind("wna16", kInt4Static, None),),
)
