"""The functions that engines know the WNA16 scheme by."""

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
    wna16_moe_quant_config,
)

from moe_wna16.scheme import SCHEME, WNA16MoEBackend

if TYPE_CHECKING:
    import torch
    from moe_core import DeviceInfo, Environment
    from torch import Tensor

_FUNCTIONS = SchemeFunctions(SCHEME)

#: the backend for a layer
_select = _FUNCTIONS.select("wna16", __name__)
#: the experts classes of a backend
backend_to_kernel_cls = _FUNCTIONS.backend_to_kernel_cls
#: what an engine's option names, as a backend
map_wna16_backend = _FUNCTIONS.map_backend
#: every backend in order of preference for a request
get_priority_backends = _FUNCTIONS.get_priority_backends
#: prepare + the selected experts + finalize around converted weights
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
    """The backend for ``config``: ``.backend``, ``.experts`` (the class) and ``.report`` (every candidate's reasons).

    ``weight_key`` says bits, zero points, group size, the scales' dtype, activation order and factors of inputs, e.g.
    ``kInt4StaticAsym.with_group(1, 64).with_scale_dtype(torch.float16)``; ``activation_key`` ``kFp8DynamicTokenSym``
    asks for e4m3 activations of int4 weights (W4AFP8).  ``weight_bits``, if it is given, must be those of the key.
    A named backend is used or refused, never replaced.  Raises SelectionError, ConfigError.
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
    """Canonical tensors of one layer in the layout of the selected backend.  Pure: the inputs stay as they are.

    - ``w13`` [E, 2N, K] (gate rows first), ``w2`` [E, K, N]: unsigned codes, uint8; int4 two in a byte, even columns
      in the low four bits: [E, 2N, ceil(K/2)] and [E, K, ceil(N/2)]
    - ``w13_scale`` [E, 2N, G], ``w2_scale`` [E, K, G] of the key's dtype, a scale for each group of columns, of which
      the last may be short; zero points of the same shapes, uint8 or int32, neither packed nor less one:
      values are ``(code - zero point) * scale``, without zero points ``(code - 8) * scale`` or ``(code - 128) * scale``
    - ``w13_g_idx`` [E, K], ``w2_g_idx`` [E, N] int32: the group of each column, where the key is permuted
    - ``w13_pre_scale`` [E, K], ``w2_pre_scale`` [E, N] float32: factors of the inputs' columns, where it is pre-scaled
    - biases [E, 2N] and [E, K]

    Raises TensorError, which names the tensor, what was found and what was expected.
    """
    return _FUNCTIONS.convert(
        selection,
        w13=w13,
        w2=w2,
        w13_scale=w13_scale,
        w2_scale=w2_scale,
        w13_zero_point=w13_zero_point,
        w2_zero_point=w2_zero_point,
        w13_g_idx=w13_g_idx,
        w2_g_idx=w2_g_idx,
        w13_pre_scale=w13_pre_scale,
        w2_pre_scale=w2_pre_scale,
        w13_bias=w13_bias,
        w2_bias=w2_bias,
    )


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
    """Scales, zero points, column groups, input factors and biases of canonical weights.  All by keyword.

    - shapes and dtypes are those of :func:`convert_to_wna16_moe_kernel_format`
    - ``weight_key``, ``activation_key`` say the kinds outright, as a selection has them; activation None: 16 bits
    - without a ``weight_key``: ``num_bits`` (4 or 8) and ``group_size`` (-1: the whole row); the tensors that are given
      say the rest

    Raises ConfigError where the keys and the tensors contradict each other, TensorError for wrong shapes and dtypes.
    """
    key = as_quant_key(weight_key, "weight_key")
    if key is None:
        if num_bits is None or group_size is None:
            raise ConfigError("weight_key is missing: give it, or num_bits and group_size")
        if activation_key is not None:
            raise ConfigError(f"activation_key is {activation_key}, but weight_key is missing")
        quant = wna16_moe_quant_config(
            num_bits=num_bits,
            group_size=group_size,
            w1_scale=w1_scale,
            w2_scale=w2_scale,
            w1_zp=w1_zp,
            w2_zp=w2_zp,
            w1_g_idx=w1_g_idx,
            w2_g_idx=w2_g_idx,
            w1_pre_scale=w1_pre_scale,
            w2_pre_scale=w2_pre_scale,
            w1_bias=w1_bias,
            w2_bias=w2_bias,
        )
        _check_groups(group_size, w1_scale, w2_scale, permuted=w1_g_idx is not None)
        return quant
    if num_bits is not None or group_size is not None:
        raise ConfigError(f"weight_key is {key}: leave out num_bits and group_size")
    quant = make_quant_config(
        weight_key=key,
        activation_key=activation_key,
        w1_scale=w1_scale,
        w2_scale=w2_scale,
        w1_zp=w1_zp,
        w2_zp=w2_zp,
        w1_g_idx=w1_g_idx,
        w2_g_idx=w2_g_idx,
        w1_pre_scale=w1_pre_scale,
        w2_pre_scale=w2_pre_scale,
        w1_bias=w1_bias,
        w2_bias=w2_bias,
        canonical=True,
    )
    _check_groups(key.group_size, w1_scale, w2_scale, permuted=key.permuted)
    return quant


def _check_groups(size: int, w1_scale: Tensor, w2_scale: Tensor, *, permuted: bool) -> None:
    """Raise TensorError where scales have another number of groups than the rows of the other matrix are columns."""
    check_shape("w1_scale", w1_scale, ("E", "2N", "G"))
    check_shape("w2_scale", w2_scale, (w1_scale.shape[0], "K", "G"))
    if permuted:
        return
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
