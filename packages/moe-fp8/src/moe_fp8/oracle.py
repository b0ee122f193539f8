"""The oracle of the FP8 schemes, and the functions that engines know it by."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from moe_core import (
    ConfigError,
    FusedMoEConfig,
    FusedMoEKernel,
    FusedMoEQuantConfig,
    KernelWeights,
    MoEWeights,
    Oracle,
    QuantKey,
    Selection,
    fp8_w8a8_moe_quant_config,
    fp8_w8a16_moe_quant_config,
    kFp8Dynamic128Sym,
    kFp8Static128BlockSym,
    registry,
)
from moe_core.oracle import Backend

if TYPE_CHECKING:
    import torch
    from moe_core import DeviceInfo, Environment, FusedMoEPrepareAndFinalizeModular
    from torch import Tensor


class Fp8MoeBackend(str, Enum):
    """Backends of this package; other packages' backends are named by their entry points."""

    TRITON = "triton"
    TORCH = "torch"


class Fp8Oracle(Oracle):
    """e4m3 weights.  Order: kernels before plain torch."""

    scheme = "fp8"
    backends = (
        Backend(Fp8MoeBackend.TRITON.value, ("moe_fp8.experts.triton:TritonFp8BlockExperts",), "moe-fp8"),
        Backend(Fp8MoeBackend.TORCH.value, ("moe_fp8.experts.torch:TorchFp8Experts",), "moe-fp8"),
    )

    def check_request(
        self, config: FusedMoEConfig, weight_key: QuantKey | None, activation_key: QuantKey | None
    ) -> None:
        if weight_key is None or weight_key.dtype.name != "e4m3":
            raise ConfigError(f"the fp8 scheme reads e4m3 weights, asked for {weight_key or '16-bit weights'}")


def select_fp8_moe_backend(
    config: FusedMoEConfig,
    *,
    weight_key: QuantKey = kFp8Static128BlockSym,
    activation_key: QuantKey | None = kFp8Dynamic128Sym,
    moe_backend: str | Fp8MoeBackend = "auto",
    device: DeviceInfo | str | torch.device | None = None,
    environment: Environment | None = None,
) -> Selection:
    """The backend for ``config``: ``.backend``, ``.experts`` (the class) and ``.report`` (every candidate's reasons).

    A named backend is used or refused, never replaced.  Raises SelectionError, ConfigError.
    """
    return (
        registry()
        .oracle("fp8")
        .select(
            config,
            weight_key=weight_key,
            activation_key=activation_key,
            moe_backend=moe_backend,
            device=device,
            environment=environment,
        )
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
    return (
        registry()
        .oracle("fp8")
        .convert(
            selection,
            MoEWeights(
                weight_key=selection.weight_key,
                activation_key=selection.activation_key,
                w13=w13,
                w2=w2,
                w13_scale=w13_scale,
                w2_scale=w2_scale,
                w13_input_scale=w13_input_scale,
                w2_input_scale=w2_input_scale,
                w13_bias=w13_bias,
                w2_bias=w2_bias,
            ),
        )
    )


def make_fp8_moe_quant_config(
    *,
    w1_scale: Tensor,
    w2_scale: Tensor,
    a1_scale: Tensor | None = None,
    a2_scale: Tensor | None = None,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    block_shape: tuple[int, int] | None = None,
    per_act_token_quant: bool = False,
    per_out_ch_quant: bool = False,
    weight_only: bool = False,
) -> FusedMoEQuantConfig:
    """Scales and biases of e4m3 weights; ``weight_only``: 16-bit activations.  All by keyword."""
    if weight_only:
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


def make_fp8_moe_kernel(
    selection: Selection,
    weights: KernelWeights,
    *,
    prepare_finalize: FusedMoEPrepareAndFinalizeModular | None = None,
) -> FusedMoEKernel:
    """prepare + the selected experts + finalize around converted weights."""
    return registry().oracle("fp8").make_kernel(selection, weights, prepare_finalize=prepare_finalize)
