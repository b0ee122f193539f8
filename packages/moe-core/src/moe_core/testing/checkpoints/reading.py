"""Read a folder that a test wrote: check the layer, or the reason for its refusal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from moe_core.checkpoint import Checkpoint, CheckpointFormat, LayerSource, find_layer, read_layer
from moe_core.errors import CheckpointError
from moe_core.reference.quantization import dequantize_weight
from moe_core.spec.quant_key import QuantKey
from moe_core.testing.checkpoints.experts import CONFIG, Experts, Tensors
from moe_core.testing.checkpoints.folders import write


def source(folder: Path, tensors: Tensors, quantization: Mapping[str, Any], **changes: Any) -> LayerSource:
    """Write a folder with these tensors and return its layer.

    Args:
        folder: The folder to write.
        tensors: Tensors by name.
        quantization: ``quantization_config`` of config.json.
        **changes: Other entries of config.json to replace.

    Returns:
        The layer.
    """
    return read_layer(_opened(folder, tensors, quantization, **changes))


def _opened(folder: Path, tensors: Tensors, quantization: Mapping[str, Any], **changes: Any) -> Checkpoint:
    # Tensors that share memory cannot be saved.
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    return Checkpoint.open(write(folder, copies, {**CONFIG, "quantization_config": quantization}, **changes))


def check(found: LayerSource, experts: Experts, weight_key: QuantKey, activation_key: QuantKey | None) -> None:
    """Check that a layer loads with the given keys and exactly the experts' values.

    Args:
        found: The layer.
        experts: The experts that were written.
        weight_key: Expected weight key.
        activation_key: Expected activation key.

    Raises:
        AssertionError: A key or value differs.
    """
    weights = found.weights()
    weights.validate(found.config, values=True)
    asked = weight_key, activation_key
    for what, keys in (
        ("layer says", (found.weight_key, found.activation_key)),
        ("layer loads", (weights.weight_key, weights.activation_key)),
    ):
        if keys != asked:
            raise AssertionError(f"the {what} {keys[0]} with {keys[1]}, expected {asked[0]} with {asked[1]}")
    for name, expected in zip(("w13", "w2"), experts.values(), strict=True):
        parts = 2 if name == "w13" and found.config.is_gated else 1
        scale = getattr(weights, f"{name}_scale")
        values = dequantize_weight(getattr(weights, name), scale, weight_key, parts=parts).double()
        if not torch.equal(values, expected):
            count = int((values != expected).sum()) if values.shape == expected.shape else values.numel()
            raise AssertionError(f"{count} of {values.numel()} values of {name} are not those that were written")


def refused(folder: Path, tensors: Tensors, quantization: Mapping[str, Any], *parts: str, **changes: Any) -> None:
    """Check that finding or loading a layer raises CheckpointError.

    Args:
        folder: The folder to write.
        tensors: Tensors by name.
        quantization: ``quantization_config`` of config.json.
        *parts: Texts that the message must contain.
        **changes: Other entries of config.json to replace.

    Raises:
        AssertionError: The layer loads, or the message lacks a text.
    """
    try:
        source(folder, tensors, quantization, **changes).weights()
    except CheckpointError as error:
        missing = [part for part in parts if part not in str(error)]
        if missing:
            raise AssertionError(f"{missing} not in the error: {error}") from error
    else:
        raise AssertionError(f"the layer loads, expected a CheckpointError: {', '.join(parts)}")


def reason_against(adapter: CheckpointFormat, folder: Path, tensors: Tensors, quantization: Mapping[str, Any]) -> str:
    """Return why a format does not read a layer.

    Args:
        adapter: The format.
        folder: The folder to write.
        tensors: Tensors by name.
        quantization: ``quantization_config`` of config.json.

    Returns:
        The format's reason, or the error that a broken config raises.

    Raises:
        AssertionError: The format reads the layer.
    """
    checkpoint = _opened(folder, tensors, quantization)
    try:
        reason = adapter.resolve(checkpoint.quantization, find_layer(checkpoint))
    except CheckpointError as error:
        return str(error)
    if not isinstance(reason, str):
        raise AssertionError(f"{adapter.name} reads the layer, expected a reason against it")
    return reason
