"""The FP8 schemes as data, registered with moe-core (entry point ``moe_core.schemes``)."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from moe_core import (
    Backend,
    QuantKey,
    SchemeSpec,
    WeightKind,
    kFp8Dynamic128Sym,
    kFp8Static128BlockSym,
    kMxfp8Dynamic,
    kMxfp8Static,
)

from moe_fp8.online import ONLINE

if TYPE_CHECKING:
    from moe_core import DeviceInfo, FusedMoEConfig


class Fp8MoeBackend(StrEnum):
    """Backends of this package; the entry points of other packages name theirs."""

    FLASHINFER_TRTLLM = "flashinfer_trtllm"
    FLASHINFER_CUTLASS = "flashinfer_cutlass"
    DEEPGEMM = "deep_gemm"
    MARLIN = "marlin"
    BATCHED_MARLIN = "batched_marlin"
    TRITON = "triton"
    TORCH = "torch"


#: backends that precede libraries on sm_90
_OWN = (Fp8MoeBackend.MARLIN.value, Fp8MoeBackend.BATCHED_MARLIN.value, Fp8MoeBackend.TRITON.value)


def _order(
    table: tuple[Backend, ...],
    device: DeviceInfo,
    config: FusedMoEConfig,
    weight_key: QuantKey | None,
    activation_key: QuantKey | None,
) -> tuple[Backend, ...]:
    """Order backends: libraries, Marlin-class, Triton, torch; on sm_90 libraries come last."""
    if device.capability // 10 != 9:
        return table
    own = [backend for backend in table if backend.name in _OWN]
    return (*own, *(backend for backend in table if backend.name not in _OWN))


def _reason_against(config: FusedMoEConfig, weight_key: QuantKey | None, activation_key: QuantKey | None) -> str | None:
    if weight_key is None or weight_key.dtype.name != "e4m3":
        return f"the fp8 scheme reads e4m3 weights, asked for {weight_key or '16-bit weights'}"
    return None


def _not_mxfp8(key: QuantKey | None) -> str | None:
    if key != kMxfp8Static:
        return f"MXFP8 weights are {kMxfp8Static}, asked for {key}: use select_fp8_moe_backend"
    return None


#: Scheme of e4m3 weights. "triton" also selects the Marlin-class kernels, which are written in Triton and are the only
#: ones for 16-bit activations.
SCHEME = SchemeSpec(
    name="fp8",
    interface_api=(1, 0),
    format_api=(1, 0),
    kernel_api=(1, 0),
    package="moe-fp8",
    backend_enum=Fp8MoeBackend,
    order=_order,
    reason_against=_reason_against,
    backends=(
        Backend(
            Fp8MoeBackend.FLASHINFER_TRTLLM.value,
            (
                "moe_fp8.experts.flashinfer_trtllm:TrtLlmFp8BlockExpertsMonolithic",
                "moe_fp8.experts.flashinfer_trtllm:TrtLlmMxfp8ExpertsMonolithic",
                "moe_fp8.experts.flashinfer_trtllm:TrtLlmFp8TensorExpertsMonolithic",
                "moe_fp8.experts.flashinfer_trtllm:TrtLlmFp8BlockExpertsModular",
                "moe_fp8.experts.flashinfer_trtllm:TrtLlmMxfp8ExpertsModular",
                "moe_fp8.experts.flashinfer_trtllm:TrtLlmFp8TensorExpertsModular",
            ),
        ),
        Backend(
            Fp8MoeBackend.FLASHINFER_CUTLASS.value,
            (
                "moe_fp8.experts.flashinfer_cutlass:FlashInferCutlassFp8TensorExperts",
                "moe_fp8.experts.flashinfer_cutlass:FlashInferCutlassFp8BlockExperts",
            ),
        ),
        Backend(
            Fp8MoeBackend.DEEPGEMM.value,
            (
                "moe_fp8.experts.deep_gemm:DeepGemmFp8BlockExperts",
                "moe_fp8.experts.deep_gemm:DeepGemmMxfp8Experts",
                "moe_fp8.experts.deep_gemm_batched:BatchedDeepGemmFp8BlockExperts",
            ),
        ),
        Backend(
            Fp8MoeBackend.MARLIN.value,
            ("moe_fp8.experts.marlin:MarlinFp8Experts",),
            aliases=(Fp8MoeBackend.TRITON.value,),
        ),
        Backend(
            Fp8MoeBackend.BATCHED_MARLIN.value,
            ("moe_fp8.experts.marlin:BatchedMarlinFp8Experts",),
            aliases=(Fp8MoeBackend.MARLIN.value, Fp8MoeBackend.TRITON.value),
        ),
        Backend(
            Fp8MoeBackend.TRITON.value,
            (
                "moe_fp8.experts.triton:TritonFp8BlockExperts",
                "moe_fp8.experts.triton_scaled_mm:TritonFp8Experts",
                "moe_fp8.experts.triton_mxfp8:TritonMxfp8Experts",
                "moe_fp8.experts.marlin:MarlinFp8QdqExperts",
            ),
        ),
        Backend(Fp8MoeBackend.TORCH.value, ("moe_fp8.experts.torch:TorchFp8Experts",)),
    ),
    formats=(
        "moe_fp8.formats.fp8_block:Fp8BlockFormat",
        "moe_fp8.formats.fp8_tensor:Fp8TensorFormat",
        "moe_fp8.formats.compressed_tensors:CompressedTensorsFp8Format",
        "moe_fp8.formats.modelopt:ModelOptFp8Format",
        "moe_fp8.formats.mxfp8:Mxfp8Format",
        "moe_fp8.formats.mxfp8:AutoRoundMxfp8Format",
        "moe_fp8.formats.auto_round:AutoRoundFp8Format",
        "moe_fp8.formats.quark:QuarkFp8Format",
        "moe_fp8.formats.w8a8_fp8:SglangFp8Format",
    ),
    quant_methods=(
        *("fp8", "compressed-tensors", "modelopt", "mxfp8", "auto-round", "intel/auto-round", "quark"),
        "w8a8_fp8",
    ),
    quickstart="moe_fp8.quickstart:MODEL.write",
    online=ONLINE,
    kinds=(
        WeightKind("fp8", kFp8Static128BlockSym, kFp8Dynamic128Sym),
        WeightKind(
            "mxfp8",
            kMxfp8Static,
            kMxfp8Dynamic,
            reason_against=_not_mxfp8,
            converted_as="fp8",
            doc="For MXFP8 weights: e4m3, one e8m0 scale per 32 columns.  ``activation_key`` None: 16-bit activations.",
        ),
    ),
)
