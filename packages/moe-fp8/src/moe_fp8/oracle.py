"""Engine-facing functions of the FP8 schemes, under the names that engines use."""

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
    tensor_arguments,
)

from moe_fp8.scheme import SCHEME

if TYPE_CHECKING:
    from torch import Tensor


_FUNCTIONS = SchemeFunctions(SCHEME)

#: Select the backend of a layer with e4m3 weights, and with MXFP8 weights.
select_fp8_moe_backend = _FUNCTIONS.select("fp8", __name__)
select_mxfp8_moe_backend = _FUNCTIONS.select("mxfp8", __name__)
#: Return the experts classes of a backend.
backend_to_kernel_cls = _FUNCTIONS.backend_to_kernel_cls
#: Map an engine's option to a backend.
map_fp8_backend = _FUNCTIONS.map_backend
#: List all backends in order of preference for a request.
get_priority_backends = _FUNCTIONS.get_priority_backends
#: Build a kernel from converted weights: prepare, the selected experts, finalize.
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
    """Convert one layer's tensors to the selected backend's layout; inputs are unchanged.

    Args:
        selection: result of a select function.
        w13: e4m3 [E, 2N, K], gate rows first.
        w2: e4m3 [E, K, N].
        w13_scale: scales of ``w13`` as in :func:`moe_core.spec.roles.scale_shape`.
        w2_scale: scales of ``w2``.
        w13_input_scale: static scales of the input of ``w13``.
        w2_input_scale: static scales of the input of ``w2``.
        w13_bias: [E, 2N].
        w2_bias: [E, K].

    Returns:
        Weights in the backend's layout.

    Raises:
        TensorError: the tensors do not fit the selection.
    """
    return _FUNCTIONS.convert(**locals())


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
    """Build the quant config of e4m3 weights of any scale type, for every backend.

    ``weight_key`` and ``activation_key`` state the schemes directly, as a selection does. Without a ``weight_key`` the
    older switches determine them.

    Args:
        w1_scale: scales of ``w13``.
        w2_scale: scales of ``w2``.
        a1_scale: static scales of the first GEMM's input.
        a2_scale: static scales of the second GEMM's input.
        w1_bias: [E, 2N].
        w2_bias: [E, K].
        weight_key: quantization of the weights.
        activation_key: quantization of the activations; None for 16-bit activations.
        block_shape: rows and columns per scale; (1, 32) with uint8 scales is MXFP8.
        per_act_token_quant: one activation scale per token.
        per_out_ch_quant: one weight scale per output channel.
        weight_only: 16-bit activations; selects kernels that dequantize weights, on GPUs and CPUs.

    Returns:
        Scales and biases with their quant keys.

    Raises:
        ConfigError: switches, keys and tensors contradict each other.
    """
    tensors = tensor_arguments(locals())
    if weight_key is not None:
        if block_shape is not None or per_act_token_quant or per_out_ch_quant:
            raise ConfigError("weight_key says the kind: leave out block_shape, per_act_token_quant, per_out_ch_quant")
        if weight_only and activation_key is not None:
            raise ConfigError(f"weight_only means 16-bit activations, the activation key is {activation_key}")
        return make_quant_config(weight_key=weight_key, activation_key=activation_key, canonical=True, **tensors)
    if activation_key is not None:
        raise ConfigError(f"activation_key is {activation_key}, but weight_key is missing")
    if weight_only:
        if a1_scale is not None or a2_scale is not None or per_act_token_quant:
            raise ConfigError("weight_only means 16-bit activations: they have no scales")
        return fp8_w8a16_moe_quant_config(block_shape=block_shape, per_out_ch_quant=per_out_ch_quant, **tensors)
    return fp8_w8a8_moe_quant_config(
        per_act_token_quant=per_act_token_quant,
        per_out_ch_quant=per_out_ch_quant,
        block_shape=block_shape,
        **tensors,
    )
