"""The oracle of the FP8 schemes, and the functions that engines know it by."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from moe_core import (
    Backend,
    ConfigError,
    FusedMoEConfig,
    FusedMoEQuantConfig,
    KernelWeights,
    Oracle,
    QuantKey,
    SchemeFunctions,
    Selection,
    as_quant_key,
    fp8_w8a8_moe_quant_config,
    fp8_w8a16_moe_quant_config,
    kFp8Dynamic128Sym,
    kFp8Static128BlockSym,
    kMxfp8Dynamic,
    kMxfp8Static,
    make_quant_config,
)

if TYPE_CHECKING:
    import torch
    from moe_core import DeviceInfo, Environment
    from torch import Tensor


class Fp8MoeBackend(StrEnum):
    """Backends of this package; other packages' backends are named by their entry points."""

    FLASHINFER_TRTLLM = "flashinfer_trtllm"
    FLASHINFER_CUTLASS = "flashinfer_cutlass"
    DEEPGEMM = "deep_gemm"
    MARLIN = "marlin"
    BATCHED_MARLIN = "batched_marlin"
    TRITON = "triton"
    TORCH = "torch"


#: what libraries come after on sm_90
_OWN = (Fp8MoeBackend.MARLIN.value, Fp8MoeBackend.BATCHED_MARLIN.value, Fp8MoeBackend.TRITON.value)


class Fp8Oracle(Oracle):
    """e4m3 weights.

    Order: libraries where they are installed, Marlin-class kernels (16-bit activations only), Triton, plain torch.  On
    sm_90 Marlin-class kernels and Triton come before libraries.  "triton" asks for Marlin-class kernels too: they are
    Triton's, and the only ones for 16-bit activations.
    """

    scheme = "fp8"
    backend_enum = Fp8MoeBackend
    backends = (
        Backend(
            Fp8MoeBackend.FLASHINFER_TRTLLM.value,
            (
                "moe_fp8.experts.flashinfer_trtllm_monolithic:TrtLlmFp8BlockExpertsMonolithic",
                "moe_fp8.experts.flashinfer_trtllm_monolithic:TrtLlmMxfp8ExpertsMonolithic",
                "moe_fp8.experts.flashinfer_trtllm_monolithic:TrtLlmFp8TensorExpertsMonolithic",
                "moe_fp8.experts.flashinfer_trtllm_modular:TrtLlmFp8BlockExpertsModular",
                "moe_fp8.experts.flashinfer_trtllm_modular:TrtLlmMxfp8ExpertsModular",
                "moe_fp8.experts.flashinfer_trtllm_modular:TrtLlmFp8TensorExpertsModular",
            ),
            "moe-fp8",
        ),
        Backend(
            Fp8MoeBackend.FLASHINFER_CUTLASS.value,
            (
                "moe_fp8.experts.flashinfer_cutlass:FlashInferCutlassFp8TensorExperts",
                "moe_fp8.experts.flashinfer_cutlass:FlashInferCutlassFp8BlockExperts",
            ),
            "moe-fp8",
        ),
        Backend(
            Fp8MoeBackend.DEEPGEMM.value,
            (
                "moe_fp8.experts.deep_gemm:DeepGemmFp8BlockExperts",
                "moe_fp8.experts.deep_gemm:DeepGemmMxfp8Experts",
                "moe_fp8.experts.deep_gemm_batched:BatchedDeepGemmFp8BlockExperts",
            ),
            "moe-fp8",
        ),
        Backend(
            Fp8MoeBackend.MARLIN.value,
            ("moe_fp8.experts.marlin:MarlinFp8Experts",),
            "moe-fp8",
            aliases=(Fp8MoeBackend.TRITON.value,),
        ),
        Backend(
            Fp8MoeBackend.BATCHED_MARLIN.value,
            ("moe_fp8.experts.marlin:BatchedMarlinFp8Experts",),
            "moe-fp8",
            aliases=(Fp8MoeBackend.TRITON.value,),
        ),
        Backend(
            Fp8MoeBackend.TRITON.value,
            (
                "moe_fp8.experts.triton:TritonFp8BlockExperts",
                "moe_fp8.experts.triton_rows:TritonFp8Experts",
                "moe_fp8.experts.triton_mxfp8:TritonMxfp8Experts",
            ),
            "moe-fp8",
        ),
        Backend(Fp8MoeBackend.TORCH.value, ("moe_fp8.experts.torch:TorchFp8Experts",), "moe-fp8"),
    )

    def order(
        self,
        table: tuple[Backend, ...],
        device: DeviceInfo,
        config: FusedMoEConfig,
        weight_key: QuantKey | None,
        activation_key: QuantKey | None,
    ) -> tuple[Backend, ...]:
        if device.capability // 10 != 9:
            return table
        own = [backend for backend in table if backend.name in _OWN]
        return (*own, *(backend for backend in table if backend.name not in _OWN))

    def check_request(
        self, config: FusedMoEConfig, weight_key: QuantKey | None, activation_key: QuantKey | None
    ) -> None:
        if weight_key is None or weight_key.dtype.name != "e4m3":
            raise ConfigError(f"the fp8 scheme reads e4m3 weights, asked for {weight_key or '16-bit weights'}")


_FUNCTIONS = SchemeFunctions("fp8", Fp8MoeBackend)

#: the experts classes of a backend
backend_to_kernel_cls = _FUNCTIONS.backend_to_kernel_cls
#: what an engine's option names, as a backend
map_fp8_backend = _FUNCTIONS.map_backend
#: every backend in order of preference for a request
get_priority_backends = _FUNCTIONS.get_priority_backends
#: prepare + the selected experts + finalize around converted weights
make_fp8_moe_kernel = _FUNCTIONS.make_kernel


def select_fp8_moe_backend(
    config: FusedMoEConfig,
    *,
    weight_key: QuantKey | str = kFp8Static128BlockSym,
    activation_key: QuantKey | str | None = kFp8Dynamic128Sym,
    moe_backend: str | Fp8MoeBackend = "auto",
    device: DeviceInfo | str | torch.device | None = None,
    environment: Environment | None = None,
) -> Selection:
    """The backend for ``config``: ``.backend``, ``.experts`` (the class) and ``.report`` (every candidate's reasons).

    A named backend is used or refused, never replaced.  Raises SelectionError, ConfigError.
    """
    return _FUNCTIONS.select(
        config,
        weight_key=weight_key,
        activation_key=activation_key,
        moe_backend=moe_backend,
        device=device,
        environment=environment,
    )


def select_mxfp8_moe_backend(
    config: FusedMoEConfig,
    *,
    weight_key: QuantKey | str = kMxfp8Static,
    activation_key: QuantKey | str | None = kMxfp8Dynamic,
    moe_backend: str | Fp8MoeBackend = "auto",
    device: DeviceInfo | str | torch.device | None = None,
    environment: Environment | None = None,
) -> Selection:
    """:func:`select_fp8_moe_backend` for MXFP8 weights (e4m3, one e8m0 scale per 32 columns).

    ``activation_key`` None asks for 16-bit activations.  Other weight keys are refused: ConfigError.
    """
    key = as_quant_key(weight_key, "weight_key")
    if key != kMxfp8Static:
        raise ConfigError(f"MXFP8 weights are {kMxfp8Static}, asked for {key}: use select_fp8_moe_backend")
    return select_fp8_moe_backend(
        config,
        weight_key=kMxfp8Static,
        activation_key=activation_key,
        moe_backend=moe_backend,
        device=device,
        environment=environment,
    )


def convert_to_fp8_moe_kernel_format(
    selection: Selection,
    *,
    w13: Tensor,
    w2: Tensor,
    w13_scale: Tensor,
    w2_scale: Tensor,
    w13_input_scale: Tensor | None = None,
    w2_input_scale: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
) -> KernelWeights:
    """Checkpoint tensors of one layer in the layout of the selected backend.  Pure: the inputs stay as they are.

    ``w13`` [E, 2N, K] e4m3 (gate rows first), ``w2`` [E, K, N] e4m3; scales as in
    :func:`moe_core.weights.scale_shape`; biases [E, 2N] and [E, K].  Raises TensorError.
    """
    return _FUNCTIONS.convert(
        selection,
        w13=w13,
        w2=w2,
        w13_scale=w13_scale,
        w2_scale=w2_scale,
        w13_input_scale=w13_input_scale,
        w2_input_scale=w2_input_scale,
        w13_bias=w13_bias,
        w2_bias=w2_bias,
    )


def make_fp8_moe_quant_config(
    *,
    w1_scale: Tensor,
    w2_scale: Tensor,
    a1_scale: Tensor | None = None,
    a2_scale: Tensor | None = None,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    weight_key: QuantKey | str | None = None,
    activation_key: QuantKey | str | None = None,
    block_shape: tuple[int, int] | None = None,
    per_act_token_quant: bool = False,
    per_out_ch_quant: bool = False,
    weight_only: bool = False,
) -> FusedMoEQuantConfig:
    """Scales and biases of e4m3 weights, for every kind of them and every backend.  All by keyword.

    - ``weight_key``, ``activation_key`` say the kinds outright, as a selection has them; activation None: 16 bits
    - without a ``weight_key`` the older switches say them: ``block_shape`` ((1, 32) with uint8 scales is MXFP8),
      ``per_out_ch_quant``, ``per_act_token_quant``, ``weight_only`` (16-bit activations: kernels that dequantise
      weights, on GPUs and CPUs alike)

    Raises ConfigError where the switches, the keys and the tensors contradict each other.
    """
    if weight_key is not None:
        if block_shape is not None or per_act_token_quant or per_out_ch_quant:
            raise ConfigError("weight_key says the kind: leave out block_shape, per_act_token_quant, per_out_ch_quant")
        if weight_only and activation_key is not None:
            raise ConfigError(f"weight_only means 16-bit activations, the activation key is {activation_key}")
        return make_quant_config(
            weight_key=weight_key,
            activation_key=activation_key,
            w1_scale=w1_scale,
            w2_scale=w2_scale,
            a1_scale=a1_scale,
            a2_scale=a2_scale,
            w1_bias=w1_bias,
            w2_bias=w2_bias,
            canonical=True,
        )
    if activation_key is not None:
        raise ConfigError(f"activation_key is {activation_key}, but weight_key is missing")
    if weight_only:
        if a1_scale is not None or a2_scale is not None or per_act_token_quant:
            raise ConfigError("weight_only means 16-bit activations: they have no scales")
        return fp8_w8a16_moe_quant_config(
            w1_scale=w1_scale,
            w2_scale=w2_scale,
            w1_bias=w1_bias,
            w2_bias=w2_bias,
            block_shape=block_shape,
            per_out_ch_quant=per_out_ch_quant,
        )
    return fp8_w8a8_moe_quant_config(
        w1_scale=w1_scale,
        w2_scale=w2_scale,
        a1_scale=a1_scale,
        a2_scale=a2_scale,
        w1_bias=w1_bias,
        w2_bias=w2_bias,
        per_act_token_quant=per_act_token_quant,
        per_out_ch_quant=per_out_ch_quant,
        block_shape=block_shape,
    )
