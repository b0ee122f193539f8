"""Weights that replace those of a loaded layer: found in a checkpoint, or quantized from 16 bits."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from moe_core.errors import ConfigError, check_shape
from moe_core.layer.recipe import completed, recipe_of
from moe_core.layer.request import LayerRequest, describe, opened
from moe_core.parallel.shard_plan import refine
from moe_core.selection.report import Selection
from moe_core.spec.config import FusedMoEConfig
from moe_core.spec.roles import INPUT_FIELDS
from moe_core.spec.weights import KernelWeights, MoEWeights

if TYPE_CHECKING:
    from moe_core.checkpoint import Checkpoint, LayerSource
    from moe_core.kernels.ops.online import OnlineQuantization

#: Config fields that a reloaded layer must share with the one it replaces.
_SAME_LAYER = (
    "num_experts",
    "top_k",
    "hidden_size",
    "intermediate_size",
    "activation",
    "params",
    "has_bias",
    "apply_router_weight_on_input",
    "routing",
)


def quantize_like(
    weights: MoEWeights,
    config: FusedMoEConfig,
    selection: Selection,
    online: OnlineQuantization | None,
    old: KernelWeights,
) -> MoEWeights:
    """Quantize 16-bit weights to the keys of a layer; return them unchanged for a 16-bit layer.

    Args:
        weights: Canonical 16-bit weights.
        config: Config of the layer.
        selection: Selection of the layer.
        online: How the layer's own 16-bit weights were quantized, if they were.
        old: Weights of the layer, with its static activation scales.

    Returns:
        Weights on the layer's device.

    Raises:
        TensorError: The weights do not fit the config.
        ConfigError: No recipe quantizes to the layer's keys.
    """
    if selection.weight_key is None:
        return weights
    # Static activation scales may come with the weights; otherwise the layer's are kept.
    has_static = any(getattr(weights, name) is not None for name in INPUT_FIELDS)
    weights = replace(weights, activation_key=selection.activation_key if has_static else None)
    weights.validate(config)
    here = weights.to(old.device)
    if online is None:
        found = recipe_of(selection).quantize(here)
        return completed(found, selection, config, old.quant_config)
    found = online.quantize(here)
    if selection.weight_key != found.weight_key:  # finer groups, for equal column shards
        found = refine(config, found, selection.weight_key)
        found = replace(found, activation_key=selection.activation_key)
    return found


def find_replacement(
    checkpoint: Checkpoint | str | os.PathLike[str],
    request: LayerRequest,
    config: FusedMoEConfig,
    selection: Selection,
    *,
    routed: bool,
) -> tuple[LayerSource, bool]:
    """Find the layer of a checkpoint that replaces a loaded one, without reading its weights.

    Args:
        checkpoint: Folder, or an open checkpoint.
        request: How the loaded layer was read, with the index of the layer to read and the loaded layer's experts.
        config: Config of the loaded layer.
        selection: Selection of the loaded layer.
        routed: Whether it has its own routing. Otherwise the top-k of the checkpoint may differ.

    Returns:
        The source, and whether it has 16-bit weights that :func:`moe_core.layer.recipe.recipe_of` quantizes.

    Raises:
        CheckpointError: The checkpoint cannot be read.
        ConfigError: The checkpoint's layer differs.
    """
    from moe_core.checkpoint.experts.find_layer import find_layer
    from moe_core.checkpoint.experts.matrices import unquantized_reason

    there = opened(checkpoint)
    request = replace(request, dtype=config.dtype, parallel=config.parallel)
    plain = request.online is None and unquantized_reason(find_layer(there, request.layer, request.stack)) is not None
    recipe = recipe_of(selection) if plain and selection.weight_key is not None else None
    if recipe is not None:
        request = replace(request, online=recipe, activation_key=recipe.activation_key)
    source = describe(there, request)
    rank, size = config.parallel.tp_rank, config.intermediate_size
    for plan in source.plans:
        begin, end = plan.ranges[rank]
        keys = (plan.weight_key, plan.activation_key)
        wanted = (selection.weight_key, selection.activation_key)
        if recipe is not None:
            wanted = (recipe.weight_key, recipe.activation_key)
        if end - begin == size and keys == wanted:
            source = source.with_plan(plan)
            break
    for name in _SAME_LAYER:
        old, new = getattr(config, name), getattr(source.config, name)
        # Where routing is given per call, a model may choose another number of experts than config.json states.
        if old != new and not (name == "top_k" and not routed):
            raise ConfigError(f"{source.prefix} of {there.path} has {name}={new}, the layer has {old}")
    return source, recipe is not None


def router_of(source: LayerSource, held: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Return the router tensors of a checkpoint's layer that replace those of a loaded one.

    Args:
        source: Layer of the checkpoint.
        held: Router tensors of the loaded layer, by name; None for those that it does not have.

    Returns:
        A new tensor for each tensor of ``held``.

    Raises:
        ConfigError: The checkpoint's layer lacks one.
        TensorError: A shape differs.
    """
    found: dict[str, Tensor] = {}
    for name, mine in held.items():
        new: Tensor | None = getattr(source, name)
        if mine is None:
            continue
        if new is None:
            raise ConfigError(f"the layer has a {name}, {source.prefix} of {source.layer.checkpoint.path} has none")
        check_shape(name, new, tuple(mine.shape))
        found[name] = new
    return found
