"""Layers with a test's launch plan, which the heuristics would not choose for their sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import torch
from moe_core.kernels.experts.grouped import GroupedExperts
from moe_core.kernels.gemm.plan import GemvPlan, TilePlan
from moe_core.parallel.prepare_finalize.by_name import default_prepare_finalize
from moe_core.reference.fused_moe import fused_moe_reference
from moe_core.runtime.kernel import FusedMoEKernel
from moe_core.spec.config import FusedMoEConfig
from moe_core.spec.quant_key import QuantKey
from moe_core.spec.workspace import Workspace, workspace_nbytes
from moe_core.testing.data import make_inputs, make_weights
from torch.nn import functional as F

from moe_kit.ensure import ensure

E = TypeVar("E", bound=GroupedExperts)


def with_plan(experts: type[E], plan: TilePlan) -> type[E]:
    """Derive a class that uses one tile plan for any number of tokens.

    Args:
        experts: Experts class.
        plan: The plan; split-K and PDL are dropped if the class does not support them.

    Returns:
        The derived class.
    """

    class Planned(experts):  # type: ignore[misc, valid-type]
        def plan(self, num_tokens: int, on_gpu: bool = True) -> TilePlan:
            chosen = plan if self.supports_split_k else plan.unsplit()
            return replace(chosen, pdl=chosen.pdl and on_gpu)

        def gemv_plan(self, num_tokens: int, on_gpu: bool = True) -> GemvPlan | None:
            return None

    return Planned


def with_gemv(experts: type[E], plan: GemvPlan | None) -> type[E]:
    """Derive a class that uses one plan of matrix-vector products for any number of tokens.

    Args:
        experts: Experts class.
        plan: The plan; None for tiles.

    Returns:
        The derived class.
    """

    class Planned(experts):  # type: ignore[misc, valid-type]
        def gemv_plan(self, num_tokens: int, on_gpu: bool = True) -> GemvPlan | None:
            return plan if plan is None or on_gpu else plan.interpreted()

    return Planned


def layer_error(
    experts: type[GroupedExperts],
    plan: TilePlan,
    weight_key: QuantKey,
    activation_key: QuantKey | None,
    device: torch.device,
    *,
    tokens: int = 5,
    seed: int = 0,
    routing: str = "uniform",
    **layer: Any,
) -> float:
    """Return the error of a layer relative to the float64 reference (Frobenius norm).

    The layer is called twice with poisoned memory and padded rows. Both results must be equal and finite.

    Args:
        experts: Experts class.
        plan: The tile plan.
        weight_key: Weight key.
        activation_key: Activation key; None for 16-bit activations.
        device: Device of the tensors.
        tokens: Number of tokens.
        seed: Seed of weights and inputs.
        routing: As for `make_inputs`.
        **layer: Fields of the config; by default 3 experts of 144 x 144 and top-2.

    Returns:
        The relative error.
    """
    config = FusedMoEConfig(**({"num_experts": 3, "top_k": 2, "hidden_size": 144, "intermediate_size": 144} | layer))
    weights = make_weights(config, weight_key, activation_key, seed=seed)
    inputs = make_inputs(config, tokens, seed=seed + 1, routing=routing)
    given: dict[str, Any] = {"topk_weights": inputs.topk_weights, "topk_ids": inputs.topk_ids}
    given["expert_map"] = inputs.expert_map
    expected = fused_moe_reference(inputs.x, weights, config, **given)
    instance = with_plan(experts, plan)(config, weight_key=weight_key, activation_key=activation_key)
    kernel = FusedMoEKernel(instance, instance.convert(weights.to(device)), default_prepare_finalize(config))
    size = workspace_nbytes(kernel.workspaces(tokens))
    kernel.workspace = Workspace(device, torch.full((size,), 0xFF, dtype=torch.uint8, device=device))
    given = {name: None if tensor is None else tensor.to(device) for name, tensor in given.items()}
    x = F.pad(inputs.x.to(device), (0, 3))[:, : config.hidden_size]
    first, second = (kernel.apply(x, **given).cpu() for _ in range(2))
    ensure(torch.equal(first, second), "the second call gives another result than the first")
    ensure(bool(torch.isfinite(first).all()), "the result has NaN or infinite elements")
    return float((first.double() - expected).norm() / expected.norm().clamp_min(1e-30))
