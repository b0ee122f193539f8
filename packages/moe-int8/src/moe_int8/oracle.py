"""The functions that engines know the INT8 schemes by.

``int8`` functions are for int8 weights (W8A8, W8A16), ``w4a8_int8`` functions for int4 weights with int8 activations;
both stand on one oracle.
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
)

from moe_int8.scheme import SCHEME, of_type

if TYPE_CHECKING:
    from torch import Tensor


_FUNCTIONS = SchemeFunctions(SCHEME)

#: the backend for a layer of int8 weights, and of int4 ones with int8 activations
select_int8_moe_backend = _FUNCTIONS.select("int8", __name__)
select_w4a8_int8_moe_backend = _FUNCTIONS.select("w4a8_int8", __name__)
#: the experts classes of a backend
backend_to_kernel_cls = _FUNCTIONS.backend_to_kernel_cls
#: what an engine's option names, as a backend
map_int8_backend = _FUNCTIONS.map_backend
#: every backend in order of preference for a request
get_priority_backends = _FUNCTIONS.get_priority_backends
#: prepare + the selected experts + finalize around converted weights
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
    """Checkpoint tensors of one layer in the layout of the selected backend.  Pure: the inputs stay as they are.

    ``w13`` [E, 2N, K] int8 (gate rows first), ``w2`` [E, K, N] int8; scales float32 [E, 2N, 1] and [E, K, 1]; static
    activation scales [E] float32 and zero points [E] int32; biases [E, 2N] and [E, K].  Raises TensorError.
    """
    return _FUNCTIONS.convert(
        selection,
        w13=w13,
        w2=w2,
        w13_scale=w13_scale,
        w2_scale=w2_scale,
        w13_input_scale=w13_input_scale,
        w2_input_scale=w2_input_scale,
        w13_input_zero_point=w13_input_zero_point,
        w2_input_zero_point=w2_input_zero_point,
        w13_bias=w13_bias,
        w2_bias=w2_bias,
    )


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
    """:func:`convert_to_int8_moe_kernel_format` for int4 weights.

    ``w13`` [E, 2N, K] and ``w2`` [E, K, N] int8, one code of -8 to 7 per byte; scales of channels float32 [E, 2N, 1]
    and [E, K, 1], of groups of g columns [E, 2N, K/g] and [E, K, N/g] in the dtype that the key says.
    """
    return convert_to_int8_moe_kernel_format(
        selection, w13=w13, w2=w2, w13_scale=w13_scale, w2_scale=w2_scale, w13_bias=w13_bias, w2_bias=w2_bias
    )


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
    """Scales, zero points and biases of int8 weights, one scale per output channel.  All by keyword.

    - ``weight_key``, ``activation_key`` say the kinds outright, as a selection has them; activation None: 16 bits
    - without a ``weight_key``: activations dynamic per token, static where ``a1_scale`` and ``a2_scale`` [E] are given
      (with zero points ``a1_zp``, ``a2_zp`` [E]); ``weight_only``: 16-bit activations.  Nothing is 16-bit unless it
      says so.

    Raises ConfigError where the switches, the keys and the tensors contradict each other.
    """
    if weight_key is not None:
        if weight_only and activation_key is not None:
            raise ConfigError(f"weight_only means 16-bit activations, the activation key is {activation_key}")
        return make_quant_config(
            weight_key=weight_key,
            activation_key=activation_key,
            w1_scale=w1_scale,
            w2_scale=w2_scale,
            a1_scale=a1_scale,
            a2_scale=a2_scale,
            a1_zp=a1_zp,
            a2_zp=a2_zp,
            w1_bias=w1_bias,
            w2_bias=w2_bias,
            canonical=True,
        )
    if activation_key is not None:
        raise ConfigError(f"activation_key is {activation_key}, but weight_key is missing")
    if weight_only:
        if any(tensor is not None for tensor in (a1_scale, a2_scale, a1_zp, a2_zp)):
            raise ConfigError("weight_only means 16-bit activations: they have no scales and no zero points")
        return int8_w8a16_moe_quant_config(w1_scale=w1_scale, w2_scale=w2_scale, w1_bias=w1_bias, w2_bias=w2_bias)
    return int8_w8a8_moe_quant_config(
        w1_scale=w1_scale,
        w2_scale=w2_scale,
        a1_scale=a1_scale,
        a2_scale=a2_scale,
        a1_zp=a1_zp,
        a2_zp=a2_zp,
        w1_bias=w1_bias,
        w2_bias=w2_bias,
        per_act_token_quant=per_act_token_quant,
    )


def make_w4a8_int8_moe_quant_config(
    *,
    w1_scale: Tensor,
    w2_scale: Tensor,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    weight_key: QuantKey | str = kInt4W4A8StaticGroup128Sym,
    activation_key: QuantKey | str = kInt8DynamicTokenSym,
) -> FusedMoEQuantConfig:
    """Scales and biases of int4 weights with int8 activations.  The keys say the group and the scales' dtype."""
    reason = of_type(INT4, "make_int8_moe_quant_config")(as_quant_key(weight_key, "weight_key"))
    if reason is not None:
        raise ConfigError(reason)
    return make_int8_moe_quant_config(
        w1_scale=w1_scale,
        w2_scale=w2_scale,
        w1_bias=w1_bias,
        w2_bias=w2_bias,
        weight_key=weight_key,
        activation_key=activation_key,
    )
