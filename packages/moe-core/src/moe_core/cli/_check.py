"""Comparison of a layer's output with the float64 reference, within the derived tolerance."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from moe_core.interface.effective import Requantizes, effective_input, effective_weights

if TYPE_CHECKING:
    from moe_core.layer.layer import FusedMoELayer
    from moe_core.spec.config import FusedMoEConfig
    from moe_core.spec.weights import MoEWeights

#: With more values, a few exceed elementwise bounds that 2e-9 of them may exceed. Then only the norm of the error
#: decides.
MOST_BOUNDED = 1_000_000


@dataclass(frozen=True)
class Check:
    """Result of a comparison.

    Attributes:
        error: Norm of the error, relative to the norm of the reference.
        tolerance: Largest allowed error, relative to the norm of the reference.
        fault: What is wrong, or None.
    """

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
        """Return a JSON-ready form."""
        return {"error": self.error, "tolerance": self.tolerance, "passed": self.passed, "fault": self.fault}


def needs_all_experts(layer: FusedMoELayer) -> bool:
    """Whether the backend requantizes weights, which may depend on the weights of all experts."""
    return isinstance(layer.kernel.experts, Requantizes)


def check_output(
    layer: FusedMoELayer,
    parts: Iterable[tuple[FusedMoEConfig, MoEWeights, Tensor | None]],
    x: Tensor,
    output: Tensor,
    *,
    topk_weights: Tensor,
    topk_ids: Tensor,
) -> Check:
    """Compare the output of a layer with the reference; all tensors are on the CPU.

    Args:
        layer: The layer.
        parts: (config, canonical weights, expert map ``[E]``) of each rank; their outputs are added up. The map selects
            the experts of the weights; None selects all.
        x: Hidden states ``[M, K]``.
        output: Output ``[M, K]`` of the layer.
        topk_weights: Router weights ``[M, k]``.
        topk_ids: Expert ids ``[M, k]``.

    Returns:
        The comparison.
    """
    from moe_core.reference.tolerance import Expected, expected_output, yardstick_dtype

    dtype, device = layer.config.dtype, layer.weights.device
    found = []
    for config, weights, expert_map in parts:
        keys = {"weight_key": weights.weight_key, "activation_key": weights.activation_key}
        experts = type(layer.kernel.experts)(config, **keys, device=layer.selection.device)
        found.append(
            expected_output(
                effective_input(experts, x),
                effective_weights(experts, weights),
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
