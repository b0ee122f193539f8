"""Tiny models for quantization tools that run as libraries, and a check of what is read from their files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from moe_core.api.models import quantized_linears
from moe_core.checkpoint import Checkpoint, read_layer
from moe_core.reference.quantization import dequantize_weight
from moe_core.testing.checkpoints import CONFIG, PREFIX
from safetensors.torch import save_file
from torch import Tensor, nn

from moe_kit.ensure import ensure

#: Number of experts, hidden size and intermediate size.
E, HIDDEN, INTER = 3, 256, 128
#: [inputs, outputs] of the experts' matrices by module.
EXPERTS = {
    **{f"{PREFIX}.{e}.{n}_proj": (HIDDEN, INTER) for e in range(E) for n in ("gate", "up")},
    **{f"{PREFIX}.{e}.down_proj": (INTER, HIDDEN) for e in range(E)},
}


def linear_model(shapes: Mapping[str, tuple[int, int]], dtype: torch.dtype) -> nn.Module:
    """Build a model of linear modules with random weights.

    Args:
        shapes: [inputs, outputs] by name of the module.
        dtype: dtype of the weights.

    Returns:
        The model.
    """
    torch.manual_seed(0)
    root = nn.Module()
    for name, (inputs, outputs) in shapes.items():
        module, *parts = root, *name.split(".")
        for part in parts[:-1]:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        module.add_module(parts[-1], nn.Linear(inputs, outputs, bias=False, dtype=dtype))
    return root


def save(folder: Path, model: nn.Module, quantization: Mapping[str, Any] | None = None) -> None:
    """Write a packed model and its config.

    Args:
        folder: The folder.
        model: The model.
        quantization: ``quantization_config`` of config.json; None for none.
    """
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / "model.safetensors")
    config = {**CONFIG, "num_experts": E, "hidden_size": HIDDEN, "moe_intermediate_size": INTER}
    if quantization is not None:
        config["quantization_config"] = dict(quantization)
    (folder / "config.json").write_text(json.dumps(config))


def check_weights(folder: Path, expected: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Check that all quantized linear modules, and the experts as a layer, read as the expected weights.

    Args:
        folder: The checkpoint folder.
        expected: Weights by name of the module, for all quantized modules.
        dtype: dtype in which the tool computes its weights.

    Raises:
        AssertionError: A module is missing, or a weight differs.
    """
    checkpoint = Checkpoint.open(folder)
    linears = {linear.name: linear for linear in quantized_linears(checkpoint, checkpoint.names)}
    differing = sorted(linears.keys() ^ expected.keys())
    ensure(not differing, f"{differing} are quantized for the tool or the reader alone")
    for name, linear in linears.items():
        ensure(torch.equal(linear.dequantize(dtype), expected[name].to(dtype)), f"{name} differs")
    layer = read_layer(checkpoint)
    weights = layer.weights()
    weights.validate(layer.config, values=True)
    for matrix, projections in (("w13", ("gate", "up")), ("w2", ("down",))):
        theirs = torch.stack(
            [torch.cat([expected[f"{PREFIX}.{e}.{n}_proj"] for n in projections]) for e in range(E)]
        ).to(dtype)
        found = {name: getattr(weights, f"{matrix}_{name}") for name in ("zero_point", "g_idx")}
        if weights.weight_key is None:
            raise AssertionError("the experts are read as 16-bit weights")
        ours = dequantize_weight(
            getattr(weights, matrix),
            getattr(weights, f"{matrix}_scale"),
            weights.weight_key,
            parts=len(projections),
            cols=theirs.shape[2],
            dtype=dtype,
            **found,
        )
        ensure(torch.equal(ours, theirs), f"{matrix} differs")
