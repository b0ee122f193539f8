"""Engine-facing functions of the INT8 schemes, under the names that engines use.

``int8`` functions are for int8 weights (W8A8, W8A16), ``w4a8_int8`` functions for int4 weights with int8 activations.
Both share one oracle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_core import (
    INT4,
    ConfigError,
    FusedMoEQuantConfig,
    KernelWeights,
    QuantKey,
    SchemeFunctions,
    Selection,
    as_quant_key,
    int8_w8a8_moe_quant_config,
    int8_w8a16_moe_quant_config,
    kInt4W4A8StaticGroup128Sym,
    kInt8DynamicTokenSym,
    make_quant_config,
    tensor_arguments,
)

from moe_int8.scheme import SCHEME, of_type

if TYPE_CHECKING:
    from torch import Tensor


_FUNCTIONS = SchemeFunctions(SCHEME)

#: Select the backend of a layer with int8 weights, and with int4 weights and int8 activations.
select_int8_moe_backend = _FUNCTIONS.select("int8", __name__)
select_w4a8_int8_moe_backend = _FUNCTIONS.select("w4a8_int8", __name__)
#: Return the experts classes of a backend.
backend_to_kernel_cls = _FUNCTIONS.backend_to_kernel_cls
#: Map an engine's option to a backend.
map_int8_backend = _FUNCTIONS.map_backend
#: List all backends in order of preference for a request.
get_priority_backends = _FUNCTIONS.get_priority_backends
#: Build a kernel from converted weights: prepare, the selected experts, finalize.
make_int8_moe_kernel = _FUNCTIONS.make_kernel
make_w4a8_int8_moe_kernel = _FUNCTIONS.make_kernel


def convert_to_int8_moe_kernel_format(
    selection: Selection,
    *,
    w13: Tensor,
    w2: Tensor,
    w13_scale: Tensor,
    w2_scale: Tensor,
    w13_input_scale: Tensor | None = None,
    w2_input_scale: Tensor | None = None,
    w13_input_zero_point: Tensor | None = None,
    w2_input_zero_point: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
) -> KernelWeights:
    """Convert one layer's tensors to the selected backend's layout; inputs are unchanged.

    Args:
        selection: result of a select function.
        w13: int8 [E, 2N, K], gate rows first.
        w2: int8 [E, K, N].
        w13_scale: float32 [E, 2N, 1].
        w2_scale: float32 [E, K, 1].
        w13_input_scale: float32 [E], static scales of the input of ``w13``.
        w2_input_scale: float32 [E], static scales of the input of ``w2``.
        w13_input_zero_point: int32 [E].
        w2_input_zero_point: int32 [E].
        w13_bias: [E, 2N].
        w2_bias: [E, K].

    Returns:
        Weights in the backend's layout.

    Raises:
        TensorError: the tensors do not fit the selection.
    """
    return _FUNCTIONS.convert(**locals())


def convert_to_w4a8_int8_moe_kernel_format(
    selection: Selection,
    *,
    w13: Tensor,
    w2: Tensor,
    w13_scale: Tensor,
    w2_scale: Tensor,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
) -> KernelWeights:
    """Convert int4 weights, like :func:`convert_to_int8_moe_kernel_format`.

    Group scales have the dtype that the weight key specifies.

    Args:
        selection: result of a select function.
        w13: int8 [E, 2N, K], one code of -8 to 7 per byte.
        w2: int8 [E, K, N], one code of -8 to 7 per byte.
        w13_scale: float32 [E, 2N, 1], or [E, 2N, K/g] for groups of g columns.
        w2_scale: float32 [E, K, 1], or [E, K, N/g] for groups of g columns.
        w13_bias: [E, 2N].
        w2_bias: [E, K].

    Returns:
        Weights in the backend's layout.

    Raises:
        TensorError: the tensors do not fit the selection.
    """
    return _FUNCTIONS.convert(**locals())


def make_int8_moe_quant_config(
    *,
    w1_scale: Tensor,
    w2_scale: Tensor,
    a1_scale: Tensor | None = None,
    a2_scale: Tensor | None = None,
    a1_zp: Tensor | None = None,
    a2_zp: Tensor | None = None,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    weight_key: QuantKey | str | None = None,
    activation_key: QuantKey | str | None = None,
    per_act_token_quant: bool = True,
    weight_only: bool = False,
) -> FusedMoEQuantConfig:
    """Build the quant config of int8 weights with one scale per output channel.

    ``weight_key`` and ``activation_key`` state the schemes directly, as a selection does. Without a ``weight_key``,
    activations are dynamic per token, or static if ``a1_scale`` and ``a2_scale`` are given. They are 16-bit only with
    ``weight_only``.

    Args:
        w1_scale: scales of ``w13``.
        w2_scale: scales of ``w2``.
        a1_scale: [E], static scales of the first GEMM's input.
        a2_scale: [E], static scales of the second GEMM's input.
        a1_zp: [E], zero points for ``a1_scale``.
        a2_zp: [E], zero points for ``a2_scale``.
        w1_bias: [E, 2N].
        w2_bias: [E, K].
        weight_key: quantization of the weights.
        activation_key: quantization of the activations; None for 16-bit activations.
        per_act_token_quant: one activation scale per token.
        weight_only: 16-bit activations.

    Returns:
        Scales, zero points and biases with their quant keys.

    Raises:
        ConfigError: switches, keys and tensors contradict each other.
    """
    tensors = tensor_arguments(locals())
    if weight_key is not None:
        if weight_only and activation_key is not None:
            raise ConfigError(f"weight_only means 16-bit activations, the activation key is {activation_key}")
        return make_quant_config(weight_key=weight_key, activation_key=activation_key, canonical=True, **tensors)
    if activation_key is not None:
        raise ConfigError(f"activation_key is {activation_key}, but weight_key is missing")
    if weight_only:
        if any(tensor is not None for tensor in (a1_scale, a2_scale, a1_zp, a2_zp)):
            raise ConfigError("weight_only means 16-bit activations: they have no scales and no zero points")
        return int8_w8a16_moe_quant_config(**tensors)
    return int8_w8a8_moe_quant_config(per_act_token_quant=per_act_token_quant, **tensors)


def make_w4a8_int8_moe_quant_config(
    *,
    w1_scale: Tensor,
    w2_scale: Tensor,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    weight_key: QuantKey | str = kInt4W4A8StaticGroup128Sym,
    activation_key: QuantKey | str = kInt8DynamicTokenSym,
) -> FusedMoEQuantConfig:
    """Build the quant config of int4 weights with int8 activations.

    Args:
        w1_scale: scales of ``w13``.
        w2_scale: scales of ``w2``.
        w1_bias: [E, 2N].
        w2_bias: [E, K].
        weight_key: quantization of the weights; specifies the group size and the scales' dtype.
        activation_key: quantization of the activations.

    Returns:
        Scales and biases with their quant keys.

    Raises:
        ConfigError: ``weight_key`` is not an int4 key, or contradicts the tensors.
    """
    given = dict(locals())
    reason = of_type(INT4, "make_int8_moe_quant_config")(as_quant_key(weight_key, "weight_key"))
    if reason is not None:
        raise ConfigError(reason)
    return make_int8_moe_quant_config(**given)
