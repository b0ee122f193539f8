"""Conversion of a layer's tensors between vLLM's parameters and moe-core's weights.

The kernels' tensors are stored in the layer's parameters. vLLM therefore accounts for them, moves them between ranks
and updates them in place, and there is no second copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from moe_core import ConfigError, FusedMoEConfig, KernelWeights, MoEWeights, QuantKey, TensorError, scale_shape
from moe_core.api.engines import unpack_row_pairs
from torch import Tensor
from vllm.model_executor.utils import replace_parameter

#: names in vLLM's quant config of tensors that kernel weights also have
_IN_QUANT_CONFIG = {
    "w1_scale": "w1_scale",
    "w2_scale": "w2_scale",
    "w1_zero_point": "w1_zp",
    "w2_zero_point": "w2_zp",
    "w1_bias": "w1_bias",
    "w2_bias": "w2_bias",
    "a1_scale": "a1_scale",
    "a2_scale": "a2_scale",
}


def canonical_weights(
    config: FusedMoEConfig,
    weight_key: QuantKey | None,
    activation_key: QuantKey | None,
    w13: Tensor,
    w2: Tensor,
    quant_config: Any,
) -> MoEWeights:
    """Return the layer's weights in canonical form, without copying any.

    Args:
        config: configuration of the layer.
        weight_key: quantization of the weights.
        activation_key: quantization of the activations.
        w13: [E, 2N, K] as vLLM stores it for its Triton kernels; packed types have two codes per byte along K.
        w2: [E, K, N], likewise.
        quant_config: vLLM's quant config with the other tensors.
    """
    experts, hidden, inter = config.local_experts, config.hidden_size, config.intermediate_size
    parts = 2 if config.is_gated else 1
    tensors: dict[str, Any] = {}
    for name, mine, rows, cols, stacked in (
        ("w13", "w1", config.w13_rows, hidden, parts),
        ("w2", "w2", hidden, inter, 1),
    ):
        scale, zero_point = getattr(quant_config, f"{mine}_scale"), getattr(quant_config, f"{mine}_zp")
        if weight_key is not None and scale is not None:
            tensors[f"{name}_scale"] = _scale(
                f"{name}_scale", scale.detach(), scale_shape(weight_key, experts, rows, cols, stacked)
            )
        if zero_point is not None and weight_key is not None and not weight_key.symmetric:
            tensors[f"{name}_zero_point"] = _zero_points(zero_point.detach(), weight_key, rows)
        static = getattr(quant_config, f"a{mine[-1]}_scale")
        if activation_key is not None and activation_key.is_static and static is not None:
            tensors[f"{name}_input_scale"] = static.detach().float().reshape(-1).expand(experts).contiguous()
        if config.has_bias:
            bias = getattr(quant_config, f"{mine}_bias")
            tensors[f"{name}_bias"] = (
                w13.new_zeros((experts, rows), dtype=config.dtype) if bias is None else bias.detach()
            )
    return MoEWeights(weight_key=weight_key, activation_key=activation_key, w13=w13, w2=w2, **tensors)


def stored_group(key: QuantKey, columns: int, scale: Tensor | None) -> QuantKey:
    """Adjust a key's group size to the scales: vLLM splits groups that a rank's shard would cut.

    Args:
        key: quantization of the weights.
        columns: columns of the weights.
        scale: [E, rows, groups].

    Returns:
        The key with the group size of the scales.

    Raises:
        ConfigError: the number of groups does not divide the columns.
    """
    if scale is None or key.group_size == -1 or scale.shape[-1] == -(-columns // key.group_size):
        return key
    if columns % scale.shape[-1]:
        raise ConfigError(f"the scales have {scale.shape[-1]} groups, which do not divide {columns} columns")
    return key.with_group(1, columns // scale.shape[-1])


def rows_in_order(tensor: Tensor) -> Tensor:
    """Reorder rows gate, up, gate, up … (gpt-oss) to gate rows, then up rows.

    Args:
        tensor: [E, 2N, ...].

    Returns:
        A contiguous tensor of the same shape.
    """
    experts, rows = tensor.shape[:2]
    return tensor.reshape(experts, rows // 2, 2, *tensor.shape[2:]).transpose(1, 2).reshape(tensor.shape).contiguous()


def adopt(layer: torch.nn.Module, weights: KernelWeights, quant_config: Any) -> dict[str, str]:
    """Store ``weights`` in the parameters of ``layer``.

    Parameters that vLLM already has get the new data, unless the memory is shared. Tensors that only the kernels have
    become new parameters. Parameters whose contents were merged into others are emptied.

    Args:
        layer: vLLM's layer.
        weights: converted weights.
        quant_config: vLLM's quant config.

    Returns:
        Parameter names by tensor name.
    """
    known = {"w13": "w13_weight", "w2": "w2_weight"}
    for mine, theirs in _IN_QUANT_CONFIG.items():
        held = getattr(quant_config, theirs)
        name = None if held is None else _name_of(layer, held)
        if name is not None:
            known[mine] = name
    names = {}
    for mine, tensor in weights.tensors():
        names[mine] = name = known.get(mine, f"moe_core_{mine}")
        held = getattr(layer, name, None)
        if held is None:
            layer.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
        elif held.data_ptr() != tensor.data_ptr() or held.nbytes != tensor.nbytes:
            replace_parameter(layer, name, tensor)
    for name in known.keys() - names.keys():
        # merged into other tensors and no longer read
        parameter = getattr(layer, known[name])
        parameter.data = parameter.data.new_empty(0)
    return names


def bound(layer: torch.nn.Module, weights: KernelWeights, names: dict[str, str]) -> KernelWeights:
    """Rebind ``weights`` to the current tensors of their parameters.

    Args:
        layer: vLLM's layer.
        weights: converted weights.
        names: result of :func:`adopt`.

    Returns:
        Weights that refer to the parameters' data.
    """
    held = {id(tensor): getattr(layer, names[mine]).detach() for mine, tensor in weights.tensors()}

    def present(tensor: Tensor) -> Tensor:
        found: Tensor = held[id(tensor)]
        return (
            found
            if found.dtype is tensor.dtype and found.shape == tensor.shape
            else found.view(tensor.dtype).view(tensor.shape)
        )

    return mapped(weights, present)


def mapped(weights: KernelWeights, change: Callable[[Tensor], Tensor]) -> KernelWeights:
    """Apply a function to every tensor of the weights.

    Args:
        weights: converted weights.
        change: function of one tensor.

    Returns:
        The weights with the changed tensors.
    """
    return replace(
        weights,
        w13=change(weights.w13),
        w2=change(weights.w2),
        quant_config=weights.quant_config.map(change),
        extra={name: change(tensor) for name, tensor in weights.extra.items()},
    )


def _name_of(layer: torch.nn.Module, tensor: Tensor) -> str | None:
    """Return the name of the layer's parameter that is ``tensor`` or shares its memory."""
    for name, parameter in layer.named_parameters(recurse=False):
        if parameter is tensor or (parameter.numel() and parameter.data_ptr() == tensor.data_ptr()):
            return name
    return None


def _scale(name: str, scale: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Reshape ``scale`` to the canonical ``shape``; a scale shared by gate and up is duplicated."""
    if scale.numel() * 2 == shape[0] * shape[1] and len(shape) == 2:
        return scale.reshape(-1, 1).expand(shape).contiguous()
    if scale.numel() != math.prod(shape):
        raise TensorError(f"{name} has shape {list(scale.shape)}, expected {list(shape)}")
    return scale.reshape(shape)


def _zero_points(zero_point: Tensor, key: QuantKey, rows: int) -> Tensor:
    """Unpack vLLM's 4-bit zero points [E, rows / 2, groups] to [E, rows, groups]."""
    if key.dtype.bits == 8 or zero_point.shape[1] == rows:
        return zero_point
    return unpack_row_pairs(zero_point)
