"""A layer's output beside the float64 reference: the error, what is allowed, and whether it is within."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from moe_core.interface.experts import FusedMoEExperts

if TYPE_CHECKING:
    from moe_core.layer.layer import FusedMoELayer
    from moe_core.spec.config import FusedMoEConfig
    from moe_core.spec.weights import MoEWeights

#: with more values, a few lie outside of bounds that 2e-9 of them leave; the norm of the error decides alone then
MOST_BOUNDED = 1_000_000


@dataclass(frozen=True)
class Check:
    """Norms relative to the reference's: of the error, and the largest that is allowed; ``fault``: what is wrong."""

    error: float
    tolerance: float
    fault: str | None

    @property
    def passed(self) -> bool:
        return self.fault is None

    def __str__(self) -> str:
        verdict = "within" if self.passed else "OUTSIDE"
        return f"relative error {self.error:.2e}, {verdict} the tolerance {self.tolerance:.2e}"

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {"error": self.error, "tolerance": self.tolerance, "passed": self.passed, "fault": self.fault}


def needs_all_experts(layer: FusedMoELayer) -> bool:
    """Whether the layer's backend computes with other weights than those given, which may depend on all experts'."""
    return type(layer.kernel.experts).requantized is not FusedMoEExperts.requantized


def check_output(
    layer: FusedMoELayer,
    parts: Iterable[tuple[FusedMoEConfig, MoEWeights, Tensor | None]],
    x: Tensor,
    output: Tensor,
    *,
    topk_weights: Tensor,
    topk_ids: Tensor,
) -> Check:
    """Compare ``output`` [M, K] of ``layer`` for hidden states ``x`` [M, K] with the reference; all on the CPU.

    ``parts``: the checkpoint's canonical weights, one part for each rank, whose outputs were added up: its config, its
    weights, and its expert map [E], which names the experts that they are of (None: all).
    """
    from moe_core.reference.tolerance import Expected, expected_output, yardstick_dtype

    dtype, device = layer.config.dtype, layer.weights.device
    found = []
    for config, weights, expert_map in parts:
        keys = {"weight_key": weights.weight_key, "activation_key": weights.activation_key}
        experts = type(layer.kernel.experts)(config, **keys, device=layer.selection.device)
        found.append(
            expected_output(
                experts.break_ties(x),
                experts.requantized(weights),
                config,
                topk_weights=topk_weights.float(),
                topk_ids=topk_ids.long(),
                expert_map=expert_map,
                compute_dtype=yardstick_dtype(dtype, device, layer.selection.activation_key),
                rounds_products=experts.claims.rounds_products,
                rounds_scales=experts.claims.rounds_scales,
            )
        )
    expected = Expected.sum_of(found, dtype)
    fault = None
    try:
        expected.compare(output, layer.selection.backend, elements=output.numel() <= MOST_BOUNDED)
    except AssertionError as error:
        fault = str(error)
    scale = float(expected.exact.norm())
    error_norm = float((output.double() - expected.exact).norm())
    if not scale:
        return Check(0.0 if not error_norm else math.inf, 0.0, fault)
    return Check(error_norm / scale, expected.limit / scale, fault)
