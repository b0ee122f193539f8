"""Engine-facing functions of the WNA16 scheme, under the names that engines use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_core import (
    ConfigError,
    FusedMoEConfig,
    FusedMoEQuantConfig,
    KernelWeights,
    QuantKey,
    SchemeFunctions,
    Selection,
    TensorError,
    as_quant_key,
    check_shape,
    kInt4Static,
    make_quant_config,
    tensor_arguments,
    wna16_moe_quant_config,
)

from moe_wna16.scheme import SCHEME, WNA16MoEBackend

if TYPE_CHECKING:
    import torch
    from moe_core import DeviceInfo, Environment
    from torch import Tensor

_FUNCTIONS = SchemeFunctions(SCHEME)

#: Select the backend of a layer.
_select = _FUNCTIONS.select("wna16", __name__)
#: Return the experts classes of a backend.
backend_to_kernel_cls = _FUNCTIONS.backend_to_kernel_cls
#: Map an engine's option to a backend.
map_wna16_backend = _FUNCTIONS.map_backend
#: List all backends in order of preference for a request.
get_priority_backends = _FUNCTIONS.get_priority_backends
#: Build a kernel from converted weights: prepare, the selected experts, finalize.
make_wna16_moe_kernel = _FUNCTIONS.make_kernel


def select_wna16_moe_backend(
    config: FusedMoEConfig,
    *,
    weight_key: QuantKey | str = kInt4Static,
    activation_key: QuantKey | str | None = None,
    weight_bits: int | None = None,
    moe_backend: str | WNA16MoEBackend = "auto",
    device: DeviceInfo | str | torch.device | None = None,
    environment: Environment | None = None,
) -> Selection:
    """Select the backend of a layer.

    A named backend is used or refused, never replaced.

    Args:
        config: configuration of the layer.
        weight_key: quantization of the weights. It specifies bits, zero points, group size, the scales' dtype,
            activation
            order and input factors, e.g. ``kInt4StaticAsym.with_group(1, 64).with_scale_dtype(torch.float16)``.
        activation_key: None for 16-bit activations; ``kFp8DynamicTokenSym`` for e4m3 activations of int4 weights
            (W4AFP8).
        weight_bits: bits per code; if given, must agree with the key.
        moe_backend: name of the backend, or "auto".
        device: device to select a backend for.
        environment: environment to check the backends' requirements against.

    Returns:
        The selection: ``.backend``, ``.experts`` (the class) and ``.report`` (all candidates with reasons).

    Raises:
        SelectionError: no backend fits.
        ConfigError: invalid arguments.
    """
    key = as_quant_key(weight_key, "weight_key")
    if weight_bits is not None and key is not None and weight_bits != key.dtype.bits:
        raise ConfigError(f"weight_bits is {weight_bits}, the weight key {key} has {key.dtype.bits}")
    return _select(
        config,
        weight_key=weight_key,
        activation_key=activation_key,
        moe_backend=moe_backend,
        device=device,
        environment=environment,
    )


def convert_to_wna16_moe_kernel_format(
    selection: Selection,
    *,
    w13: Tensor,
    w2: Tensor,
    w13_scale: Tensor,
    w2_scale: Tensor,
    w13_zero_point: Tensor | None = None,
    w2_zero_point: Tensor | None = None,
    w13_g_idx: Tensor | None = None,
    w2_g_idx: Tensor | None = None,
    w13_pre_scale: Tensor | None = None,
    w2_pre_scale: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
) -> KernelWeights:
    """Convert a layer's canonical tensors to the backend's layout; inputs are unchanged.

    Values are ``(code - zero point) * scale``; without zero points ``(code - 8) * scale`` or ``(code - 128) * scale``.
    int4 codes are two per byte, even columns in the low four bits. Zero points are neither packed nor reduced by one.

    Args:
        selection: result of :func:`select_wna16_moe_backend`.
        w13: uint8 codes [E, 2N, K], gate rows first; int4 [E, 2N, ceil(K/2)].
        w2: uint8 codes [E, K, N]; int4 [E, K, ceil(N/2)].
        w13_scale: [E, 2N, G] in the key's dtype, one per group of columns; the last group may be partial.
        w2_scale: [E, K, G] in the key's dtype.
        w13_zero_point: uint8 or int32 [E, 2N, G].
        w2_zero_point: uint8 or int32 [E, K, G].
        w13_g_idx: int32 [E, K], the group of each column, if the key is permuted.
        w2_g_idx: int32 [E, N], the group of each column, if the key is permuted.
        w13_pre_scale: float32 [E, K], factors of the input columns, if the key is pre-scaled.
        w2_pre_scale: float32 [E, N], factors of the input columns, if the key is pre-scaled.
        w13_bias: [E, 2N].
        w2_bias: [E, K].

    Returns:
        Weights in the backend's layout.

    Raises:
        TensorError: names the tensor, the value found and what was expected.
    """
    return _FUNCTIONS.convert(**locals())


def make_wna16_moe_quant_config(
    *,
    w1_scale: Tensor,
    w2_scale: Tensor,
    w1_zp: Tensor | None = None,
    w2_zp: Tensor | None = None,
    w1_g_idx: Tensor | None = None,
    w2_g_idx: Tensor | None = None,
    w1_pre_scale: Tensor | None = None,
    w2_pre_scale: Tensor | None = None,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    weight_key: QuantKey | str | None = None,
    activation_key: QuantKey | str | None = None,
    num_bits: int | None = None,
    group_size: int | None = None,
) -> FusedMoEQuantConfig:
    """Build the quant config of canonical WNA16 weights.

    Shapes and dtypes are those of :func:`convert_to_wna16_moe_kernel_format`. ``weight_key`` and ``activation_key``
    state the schemes directly, as a selection does. Without a ``weight_key``, ``num_bits`` and ``group_size`` are
    required; the given tensors determine the rest.

    Args:
        w1_scale: scales of ``w13``.
        w2_scale: scales of ``w2``.
        w1_zp: zero points of ``w13``.
        w2_zp: zero points of ``w2``.
        w1_g_idx: column groups of ``w13``.
        w2_g_idx: column groups of ``w2``.
        w1_pre_scale: factors of the input columns of ``w13``.
        w2_pre_scale: factors of the input columns of ``w2``.
        w1_bias: [E, 2N].
        w2_bias: [E, K].
        weight_key: quantization of the weights.
        activation_key: quantization of the activations; None for 16-bit activations.
        num_bits: 4 or 8.
        group_size: columns per group, -1 for the whole row.

    Returns:
        Scales and their companions with the quant keys.

    Raises:
        ConfigError: keys and tensors contradict each other.
        TensorError: a shape or dtype is wrong.
    """
    tensors = tensor_arguments(locals())
    key = as_quant_key(weight_key, "weight_key")
    if key is None:
        if num_bits is None or group_size is None:
            raise ConfigError("weight_key is missing: give it, or num_bits and group_size")
        if activation_key is not None:
            raise ConfigError(f"activation_key is {activation_key}, but weight_key is missing")
        quant = wna16_moe_quant_config(num_bits=num_bits, group_size=group_size, **tensors)
    elif num_bits is not None or group_size is not None:
        raise ConfigError(f"weight_key is {key}: leave out num_bits and group_size")
    else:
        quant = make_quant_config(weight_key=key, activation_key=activation_key, canonical=True, **tensors)
    _check_groups(quant.weight_key, w1_scale, w2_scale)
    return quant


def _check_groups(key: QuantKey | None, w1_scale: Tensor, w2_scale: Tensor) -> None:
    """Raise TensorError if the groups do not match the rows of the other matrix's scales."""
    check_shape("w1_scale", w1_scale, ("E", "2N", "G"))
    check_shape("w2_scale", w2_scale, (w1_scale.shape[0], "K", "G"))
    if key is None or key.permuted:
        return
    size = key.group_size
    (_, rows, groups), (_, hidden, second) = w1_scale.shape, w2_scale.shape
    expected = -(-hidden // size) if size > 0 else 1
    if groups != expected:
        raise TensorError(
            f"w1_scale has {groups} groups, expected {expected}: of {size} columns of {hidden}, as w2_scale has rows"
        )
    # with a gate, and without
    possible = sorted({-(-inter // size) if size > 0 else 1 for inter in (rows // 2, rows)})
    if second not in possible:
        raise TensorError(
            f"w2_scale has {second} groups, expected {' or '.join(map(str, possible))}: of {size} columns, "
            f"as w1_scale has {rows} rows"
        )
