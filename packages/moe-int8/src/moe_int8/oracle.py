"""The oracle of the INT8 schemes, and the functions that engines know it by.

``int8`` functions are for int8 weights (W8A8, W8A16), ``w4a8_int8`` functions for int4 weights with int8 activations;
both stand on one oracle.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from moe_core import (
    INT4,
    INT8,
    Backend,
    ConfigError,
    FusedMoEConfig,
    FusedMoEQuantConfig,
    KernelWeights,
    Oracle,
    QuantDtype,
    QuantKey,
    SchemeFunctions,
    Selection,
    as_quant_key,
    int8_w8a8_moe_quant_config,
    int8_w8a16_moe_quant_config,
    kInt4W4A8StaticGroup128Sym,
    kInt8DynamicTokenSym,
    kInt8StaticChannelSym,
    make_quant_config,
)

if TYPE_CHECKING:
    import torch
    from moe_core import DeviceInfo, Environment
    from torch import Tensor


class Int8MoeBackend(StrEnum):
    """Backends of this package; other packages' backends are named by their entry points."""

    TRITON = "triton"
    TORCH = "torch"


class Int8Oracle(Oracle):
    """int8 weights, and int4 weights with int8 activations.  Order: Triton, plain torch."""

    scheme = "int8"
    backend_enum = Int8MoeBackend
    backends = (
        Backend(
            Int8MoeBackend.TRITON.value,
            (
                "moe_int8.experts.triton:TritonInt8Experts",
                "moe_int8.experts.triton_weight_only:TritonInt8WeightOnlyExperts",
                "moe_int8.experts.triton_w4a8:TritonW4A8Int8Experts",
            ),
            "moe-int8",
        ),
        Backend(Int8MoeBackend.TORCH.value, ("moe_int8.experts.torch:TorchInt8Experts",), "moe-int8"),
    )

    def check_request(
        self, config: FusedMoEConfig, weight_key: QuantKey | None, activation_key: QuantKey | None
    ) -> None:
        if weight_key is None or weight_key.dtype not in (INT8, INT4) or not weight_key.symmetric:
            raise ConfigError(
                f"the int8 scheme reads symmetric int8 and int4 weights, asked for {weight_key or '16-bit weights'}"
            )
        if weight_key.dtype == INT4 and activation_key is None:
            raise ConfigError(
                "the int8 scheme multiplies int4 weights with int8 activations, asked for 16-bit ones: "
                "those are the scheme wna16's"
            )


_FUNCTIONS = SchemeFunctions("int8", Int8MoeBackend)

#: the experts classes of a backend
backend_to_kernel_cls = _FUNCTIONS.backend_to_kernel_cls
#: what an engine's option names, as a backend
map_int8_backend = _FUNCTIONS.map_backend
#: every backend in order of preference for a request
get_priority_backends = _FUNCTIONS.get_priority_backends
#: prepare + the selected experts + finalize around converted weights
make_int8_moe_kernel = _FUNCTIONS.make_kernel
make_w4a8_int8_moe_kernel = _FUNCTIONS.make_kernel


def select_int8_moe_backend(
    config: FusedMoEConfig,
    *,
    weight_key: QuantKey | str = kInt8StaticChannelSym,
    activation_key: QuantKey | str | None = kInt8DynamicTokenSym,
    moe_backend: str | Int8MoeBackend = "auto",
    device: DeviceInfo | str | torch.device | None = None,
    environment: Environment | None = None,
) -> Selection:
    """The backend for ``config``: ``.backend``, ``.experts`` (the class) and ``.report`` (every candidate's reasons).

    ``activation_key`` None asks for 16-bit activations (W8A16).  A named backend is used or refused, never replaced.
    Raises SelectionError, ConfigError.
    """
    _check_dtype(weight_key, INT8, "select_w4a8_int8_moe_backend")
    return _FUNCTIONS.select(
        config,
        weight_key=weight_key,
        activation_key=activation_key,
        moe_backend=moe_backend,
        device=device,
        environment=environment,
    )


def select_w4a8_int8_moe_backend(
    config: FusedMoEConfig,
    *,
    weight_key: QuantKey | str = kInt4W4A8StaticGroup128Sym,
    activation_key: QuantKey | str = kInt8DynamicTokenSym,
    moe_backend: str | Int8MoeBackend = "auto",
    device: DeviceInfo | str | torch.device | None = None,
    environment: Environment | None = None,
) -> Selection:
    """:func:`select_int8_moe_backend` for int4 weights: by channel, or in groups of 128, 64 or 32 columns."""
    _check_dtype(weight_key, INT4, "select_int8_moe_backend")
    return _FUNCTIONS.select(
        config,
        weight_key=weight_key,
        activation_key=activation_key,
        moe_backend=moe_backend,
        device=device,
        environment=environment,
    )


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
    _check_dtype(weight_key, INT4, "make_int8_moe_quant_config")
    return make_int8_moe_quant_config(
        w1_scale=w1_scale,
        w2_scale=w2_scale,
        w1_bias=w1_bias,
        w2_bias=w2_bias,
        weight_key=weight_key,
        activation_key=activation_key,
    )


def _check_dtype(weight_key: QuantKey | str, dtype: QuantDtype, other: str) -> None:
    key = as_quant_key(weight_key, "weight_key")
    if key is None or key.dtype != dtype:
        raise ConfigError(f"this function is for {dtype.name} weights, asked for {key}: use {other}")
