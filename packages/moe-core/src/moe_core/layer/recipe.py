"""Quantize 16-bit weights to the keys of a layer, even one from a quantized checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from moe_core.errors import ConfigError
from moe_core.kernels.ops.online import OnlineQuantization
from moe_core.selection.registry import registry
from moe_core.selection.report import Selection
from moe_core.spec.config import FusedMoEConfig
from moe_core.spec.quant_config import FusedMoEQuantConfig
from moe_core.spec.quant_key import QuantKey
from moe_core.spec.roles import ROLES, matrices
from moe_core.spec.weights import MoEWeights


def recipe_of(selection: Selection) -> OnlineQuantization:
    """Return how to quantize 16-bit weights to the weight key of a selection.

    :func:`completed` adds the tensors that the key requires in addition to the codes.

    Args:
        selection: Selection of the layer.

    Returns:
        The online quantization.

    Raises:
        ConfigError: The key is for weights that only a checkpoint can provide, or the layer has 16-bit weights.
    """
    key, activation, scheme = selection.weight_key, selection.activation_key, selection.report.scheme
    if key is None:
        raise ConfigError("the layer's weights are in 16 bits: they are not quantized")
    if key.pre_scaled:
        raise ConfigError(
            f"16-bit weights cannot be quantized as {key}: it needs smoothing factors from a checkpoint; "
            "reload a checkpoint of the layer's format"
        )
    plain = replace(key, permuted=False)
    known = (registry().online(name) for name in registry().online_names())
    quantizer = next((one.quantizer for one in known if (one.scheme, one.weight_key) == (scheme, plain)), None)
    dynamic = None if activation is None or activation.is_static else activation
    return OnlineQuantization(f"reload as {plain}", scheme, plain, dynamic, quantizer)


def completed(
    weights: MoEWeights, selection: Selection, config: FusedMoEConfig, held: FusedMoEQuantConfig
) -> MoEWeights:
    """Add the tensors that the layer's keys require in addition to codes and scales.

    These are the layer's static activation scales and zero points, unless ``weights`` have them. For permuted keys they
    also include group indices, which assign groups in the order of the columns.

    Args:
        weights: Weights quantized by :func:`recipe_of`.
        selection: Selection of the layer.
        config: Config of the layer.
        held: The layer's quantization tensors.

    Returns:
        Weights with the keys of the selection.
    """
    key, activation = selection.weight_key, selection.activation_key
    extra: dict[str, Any] = {}
    for number, matrix in enumerate(matrices(config, key, activation), start=1):
        for role in ROLES:
            if role.of_activations and matrix.has(role):
                tensor = getattr(weights, matrix.field(role))
                extra[matrix.field(role)] = getattr(held, role.argument(number)) if tensor is None else tensor
        if key is not None and key.permuted:
            extra[f"{matrix.name}_g_idx"] = _groups(key, weights.w13.shape[0], matrix.cols, weights.w13.device)
    return replace(weights, weight_key=key, activation_key=activation, **extra)


def _groups(key: QuantKey, experts: int, columns: int, device: torch.device) -> torch.Tensor:
    size = columns if key.group_size == -1 else key.group_size
    return (torch.arange(columns, dtype=torch.int32, device=device) // size).repeat(experts, 1)
