"""The MXFP4 scheme as data, registered with moe-core (entry point ``moe_core.schemes``)."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from moe_core import Backend, QuantKey, SchemeSpec, WeightKind, kMxfp4Static

from moe_mxfp4.keys import ACTIVATIONS
from moe_mxfp4.online import ONLINE

if TYPE_CHECKING:
    from moe_core import DeviceInfo, FusedMoEConfig


class Mxfp4MoeBackend(StrEnum):
    """Backends of this package; the entry points of other packages name theirs."""

    FLASHINFER_TRTLLM = "flashinfer_trtllm"
    MARLIN = "marlin"
    BATCHED_MARLIN = "batched_marlin"
    FLASHINFER_CUTLASS = "flashinfer_cutlass"
    TRITON = "triton"
    TRITON_KERNELS = "triton_kernels"
    TORCH = "torch"


def _order(
    table: tuple[Backend, ...],
    device: DeviceInfo,
    config: FusedMoEConfig,
    weight_key: QuantKey | None,
    activation_key: QuantKey | None,
) -> tuple[Backend, ...]:
    """Order backends: those that support the activations first, so that reports start with them."""

    def takes(backend: Backend) -> bool:
        return any(experts.claims.takes_keys(weight_key, activation_key) for experts in backend.load())

    return tuple(sorted(table, key=lambda backend: not takes(backend)))


def _reason_against(config: FusedMoEConfig, weight_key: QuantKey | None, activation_key: QuantKey | None) -> str | None:
    if weight_key != kMxfp4Static:
        return f"the mxfp4 scheme reads {kMxfp4Static}, asked for {weight_key or '16-bit weights'}"
    if activation_key is not None and activation_key not in ACTIVATIONS:
        known = ", ".join(map(str, ACTIVATIONS))
        return f"the mxfp4 scheme multiplies with 16-bit activations or {known}; asked for {activation_key}"
    return None


_DOC = """``activation_key``: ``kMxfp8Dynamic``, ``kFp8DynamicTokenSym``, ... ask for quantized activations, None for
    16-bit ones; neither is ever replaced.  ``"auto"`` asks for nothing: activations stay in 16 bits, unless
    ``moe_backend`` names a backend that cannot run so on the device but can with others; ``.activation_key`` then says
    which."""

#: Scheme of e2m1 weights with one e8m0 scale per 32 columns of a row.
SCHEME = SchemeSpec(
    name="mxfp4",
    interface_api=(1, 0),
    format_api=(1, 0),
    kernel_api=(1, 0),
    package="moe-mxfp4",
    backend_enum=Mxfp4MoeBackend,
    order=_order,
    reason_against=_reason_against,
    weight_only=True,
    backends=(
        Backend(
            Mxfp4MoeBackend.FLASHINFER_TRTLLM.value,
            (
                "moe_mxfp4.experts.flashinfer_trtllm:TrtLlmMxfp4ExpertsMonolithic",
                "moe_mxfp4.experts.flashinfer_trtllm:TrtLlmMxfp4ExpertsModular",
            ),
        ),
        Backend(
            Mxfp4MoeBackend.MARLIN.value,
            (
                "moe_mxfp4.experts.marlin:MarlinMxfp4Experts",
                "moe_mxfp4.experts.marlin_fp8:MarlinMxfp4Fp8Experts",
                "moe_mxfp4.experts.marlin:MarlinMxfp4QdqExperts",
            ),
        ),
        Backend(
            Mxfp4MoeBackend.BATCHED_MARLIN.value,
            ("moe_mxfp4.experts.marlin:BatchedMarlinMxfp4Experts",),
            aliases=(Mxfp4MoeBackend.MARLIN.value,),
        ),
        Backend(
            Mxfp4MoeBackend.FLASHINFER_CUTLASS.value,
            (
                "moe_mxfp4.experts.flashinfer_cutlass:FlashInferCutlassMxfp4Bf16Experts",
                "moe_mxfp4.experts.flashinfer_cutlass:FlashInferCutlassMxfp4Mxfp8Experts",
            ),
        ),
        Backend(Mxfp4MoeBackend.TRITON.value, ("moe_mxfp4.experts.triton:TritonMxfp4Experts",)),
        Backend(Mxfp4MoeBackend.TRITON_KERNELS.value, ("moe_mxfp4.experts.oai_triton:OAITritonExperts",)),
        Backend(Mxfp4MoeBackend.TORCH.value, ("moe_mxfp4.experts.torch:TorchMxfp4Experts",)),
    ),
    formats=(
        "moe_mxfp4.formats.gpt_oss:GptOssMxfp4Format",
        "moe_mxfp4.formats.fp8_method:Fp8MethodMxfp4Format",
        "moe_mxfp4.formats.compressed_tensors:CompressedTensorsMxfp4Format",
        "moe_mxfp4.formats.quark:QuarkMxfp4Format",
        "moe_mxfp4.formats.modelopt:ModelOptMxfp4Format",
        "moe_mxfp4.formats.auto_round:AutoRoundMxfp4Format",
    ),
    quant_methods=("mxfp4", "fp8", "compressed-tensors", "modelopt", "quark", "auto-round", "intel/auto-round"),
    quickstart="moe_mxfp4.quickstart:MODEL.write",
    online=ONLINE,
    kinds=(WeightKind("mxfp4", kMxfp4Static, "auto", ACTIVATIONS, doc=_DOC),),
)
