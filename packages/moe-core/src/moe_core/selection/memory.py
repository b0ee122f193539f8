"""Estimate the device memory of a layer before any of its weights are read.

One expert of zeros is laid out as the backend would do it. Experts are alike, so a layer takes a multiple of its size.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_core.errors import ConfigError, check_instance
from moe_core.interface.experts import FusedMoEExpertsModular
from moe_core.parallel.prepare_finalize.by_name import default_prepare_finalize
from moe_core.selection.oracle import Oracle
from moe_core.selection.report import Selection
from moe_core.spec.config import FusedMoEConfig, whole_number
from moe_core.spec.quant_key import QuantKey
from moe_core.spec.roles import ROLES, matrices
from moe_core.spec.weights import MoEWeights
from moe_core.spec.workspace import workspace_nbytes

#: Size in bytes above which no expert is laid out.
LARGEST_EXPERT = 1 << 28


@dataclass(frozen=True)
class LayerMemory:
    """Device memory of the layer's local experts, in bytes.

    Attributes:
        weights: Weights in the backend's layout.
        load_peak: Peak while :func:`moe_core.load_layer` converts them: tensors of the checkpoint and of the backend
            together.
        workspace: Workspace of a call with at most ``num_tokens`` tokens; None if only a library that is not installed
            knows it. A host-driven backend (``cuda_graph=False``) allocates more from torch as it runs.
        num_tokens: Number of tokens that the workspace is for.
        exact: False if the size in the checkpoint is used in place of the backend's, because its layout needs values or
            is too large.
    """

    weights: int
    load_peak: int
    workspace: int | None
    num_tokens: int
    exact: bool


def layer_memory(selection: Selection, num_tokens: int) -> LayerMemory:
    """Estimate the device memory of a selected layer and of a call with ``num_tokens`` tokens.

    The device does not have to be present. Nothing is read, and at most one expert of zeros is laid out, on the CPU.

    Args:
        selection: Selection of the layer.
        num_tokens: Largest number of tokens of a call.

    Returns:
        The estimate.
    """
    check_instance("selection", selection, Selection)
    whole_number("num_tokens", num_tokens, least=0)
    config = selection.config
    one = replace(selection, report=replace(selection.report, config=replace(config, num_local_experts=1)))
    keys = selection.weight_key, selection.activation_key
    canonical = sum(tensor.nbytes for _, tensor in example_weights(one.config, *keys, "meta").tensors())
    weights, load_peak = canonical, 2 * canonical
    exact = False
    if canonical <= LARGEST_EXPERT:
        # The conversion of a library may need the library, or values.
        with suppress(Exception):
            weights, load_peak = _laid_out(one, example_weights(one.config, *keys))
            exact = True
    tokens = num_tokens
    if issubclass(selection.experts, FusedMoEExpertsModular):
        # Tokens of other ranks arrive too, and only the engine knows how many.
        with suppress(ConfigError):
            tokens = default_prepare_finalize(config).max_tokens(num_tokens)
    workspace = None
    with suppress(Exception):
        workspace = workspace_nbytes(Oracle.make_experts(selection).workspaces(tokens))
    return LayerMemory(
        weights=config.local_experts * weights,
        load_peak=config.local_experts * load_peak,
        workspace=workspace,
        num_tokens=num_tokens,
        exact=exact,
    )


def _laid_out(selection: Selection, weights: MoEWeights) -> tuple[int, int]:
    """Bytes of the converted ``weights``, and of converted and given ones together."""
    converted = Oracle.make_experts(selection).convert(weights)
    own, made = _memory(dict(weights.tensors())), _memory(dict(converted.tensors()))
    return sum(made.values()), sum({**own, **made}.values())


def _memory(tensors: dict[str, Tensor]) -> dict[int, int]:
    """Bytes of the storages of the tensors, by address, so that each counts once."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors.values() if t.numel()}


def example_weights(
    config: FusedMoEConfig,
    weight_key: QuantKey | None,
    activation_key: QuantKey | None,
    device: str = "cpu",
) -> MoEWeights:
    """Create canonical weights of zeros with the shapes and dtypes of a layer.

    Args:
        config: Config of the layer.
        weight_key: Quantization of weights; None for 16 bits.
        activation_key: Quantization of activations; None for 16 bits.
        device: Device; on "meta" the tensors take no memory.

    Returns:
        The weights.
    """
    tensors: dict[str, Any] = {}
    for matrix in matrices(config, weight_key, activation_key):
        for role in filter(matrix.has, ROLES):
            dtype = matrix.dtypes(role)[0]
            tensors[matrix.field(role)] = torch.zeros(matrix.shape(role), dtype=dtype, device=device)
        if weight_key is not None and weight_key.permuted:
            groups = torch.arange(matrix.cols, dtype=torch.int32, device="cpu") // max(weight_key.group_size, 1)
            tensors[f"{matrix.name}_g_idx"] = groups.to(device).expand(config.local_experts, -1).contiguous()
    return MoEWeights(weight_key=weight_key, activation_key=activation_key, **tensors)
