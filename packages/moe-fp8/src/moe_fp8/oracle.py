"""The functions that engines know the FP8 schemes by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_core import (
    ConfigError,
    FusedMoEQuantConfig,
    KernelWeights,
    QuantKey,
    SchemeFunctions,
    Selection,
    fp8_w8a8_moe_quant_config,
    fp8_w8a16_moe_quant_config,
    make_quant_config,
)

from moe_fp8.scheme import SCHEME

if TYPE_CHECKING:
    from torch import Tensor


_FUNCTIONS = SchemeFunctions(SCHEME)

#: the backend for a layer of e4m3 weights, and of MXFP8 ones
select_fp8_moe_backend = _FUNCTIONS.select("fp8", __name__)
select_mxfp8_moe_backend = _FUNCTIONS.select("mxfp8", __name__)
#: the experts classes of a backend
backend_to_kernel_cls = _FUNCTIONS.backend_to_kernel_cls
#: what an engine's option names, as a backend
map_fp8_backend = _FUNCTIONS.map_backend
#: every backend in order of preference for a request
get_priority_backends = _FUNCTIONS.get_priority_backends
#: prepare + the selected experts + finalize around converted weights
make_fp8_moe_kernel = _FUNCTIONS.make_kernel


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
    :func:`moe_core.spec.weights.scale_shape`; biases [E, 2N] and [E, K].  Raises TensorError.
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
