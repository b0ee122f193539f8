"""Memory that a layer takes on its device, told before anything of it is read.

One expert of zeros is laid out as the backend does it: experts are alike, and a layer has their number times as much.
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
from moe_core.spec.weights import MoEWeights, scale_shape, storage_dtypes
from moe_core.spec.workspace import workspace_nbytes

#: bytes of one expert, beyond which none is laid out
LARGEST_EXPERT = 1 << 28


@dataclass(frozen=True)
class LayerMemory:
    """Bytes on the device of the layer's local experts.

    - ``weights`` in the backend's layout
    - ``load_peak``: the most that exists at a time while :func:`moe_core.load_layer` converts them, the checkpoint's
      tensors and the backend's own together
    - ``workspace`` of a call with at most ``num_tokens`` tokens, None where only a library that is not installed knows;
      a backend that is driven by the host (``cuda_graph=False``) takes more from torch's allocator as it goes
    - ``exact``: False where the checkpoint's bytes stand for the backend's, whose layout needs values or is too large
    """

    weights: int
    load_peak: int
    workspace: int | None
    num_tokens: int
    exact: bool


def layer_memory(selection: Selection, num_tokens: int) -> LayerMemory:
    """What the selected layer takes on its device, which need not be here, and a call with ``num_tokens`` tokens.

    Nothing is read, and at most one expert of zeros is laid out, on the CPU.
    """
    check_instance("selection", selection, Selection)
    whole_number("num_tokens", num_tokens, least=0)
    config = selection.config
    one = replace(selection, report=replace(selection.report, config=replace(config, num_local_experts=1)))
    keys = selection.weight_key, selection.activation_key
    canonical = sum(tensor.nbytes for _, tensor in specimen(one.config, *keys, "meta").tensors())
    weights, load_peak = canonical, 2 * canonical
    exact = False
    if canonical <= LARGEST_EXPERT:
        # a library's conversion may need the library, or values
        with suppress(Exception):
            weights, load_peak = _laid_out(one, specimen(one.config, *keys))
            exact = True
    tokens = num_tokens
    if issubclass(selection.experts, FusedMoEExpertsModular):
        # tokens of other ranks come too, and only the engine knows how many
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
    """(bytes of the converted ``weights``, bytes of them and the given ones together)."""
    converted = Oracle.make_experts(selection).convert(weights)
    own, made = _memory(dict(weights.tensors())), _memory(dict(converted.tensors()))
    return sum(made.values()), sum({**own, **made}.values())


def _memory(tensors: dict[str, Tensor]) -> dict[int, int]:
    """Bytes of the memory that the tensors lie in, each piece once."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors.values() if t.numel()}


def specimen(
    config: FusedMoEConfig,
    weight_key: QuantKey | None,
    activation_key: QuantKey | None,
    device: str = "cpu",
) -> MoEWeights:
    """Canonical weights of the right shapes and dtypes, of zeros; on the device "meta" they take no memory."""
    experts, parts = config.local_experts, 2 if config.is_gated else 1
    packing = None if weight_key is None else weight_key.packing
    per_word = 1 if packing is None else packing.values_per_word
    dtype = config.dtype if weight_key is None else storage_dtypes(weight_key)[0]
    tensors: dict[str, Any] = {}

    def add(name: str, dtype: torch.dtype, *shape: int) -> None:
        tensors[name] = torch.zeros(shape, dtype=dtype, device=device)

    for name, rows, cols, stacked in (
        ("w13", config.w13_rows, config.hidden_size, parts),
        ("w2", config.hidden_size, config.intermediate_size, 1),
    ):
        add(name, dtype, experts, rows, -(-cols // per_word))
        if config.has_bias:
            add(f"{name}_bias", config.dtype, experts, rows)
        if weight_key is not None:
            scales = scale_shape(weight_key, experts, rows, cols, stacked)
            add(f"{name}_scale", weight_key.scale.dtype, *scales)
            if not weight_key.symmetric:
                add(f"{name}_zero_point", torch.uint8, *scales)
            if weight_key.permuted:
                groups = torch.arange(cols, dtype=torch.int32, device="cpu") // max(weight_key.group_size, 1)
                tensors[f"{name}_g_idx"] = groups.to(device).expand(experts, cols).contiguous()
            if weight_key.pre_scaled:
                add(f"{name}_pre_scale", torch.float32, experts, cols)
        if activation_key is not None and activation_key.is_static:
            add(f"{name}_input_scale", torch.float32, experts)
            if not activation_key.symmetric:
                add(f"{name}_input_zero_point", torch.int32, experts)
    return MoEWeights(weight_key=weight_key, activation_key=activation_key, **tensors)
