"""Layers for few tokens, whose pairs are not sorted, compared with the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from moe_core.kernels.experts.grouped import GroupedExperts
from moe_core.kernels.gemm.gemv.plan import GemvLayer
from moe_core.reference.tolerance import expected_output
from moe_core.spec.config import FusedMoEConfig
from moe_core.spec.device import DeviceInfo
from moe_core.spec.quant_key import QuantKey
from moe_core.spec.workspace import Workspace
from moe_core.testing.data import make_inputs, make_weights
from torch import Tensor


@dataclass(frozen=True)
class FewTokens:
    """A layer that is called with few tokens.

    Attributes:
        experts: Experts class.
        config: The layer.
        key: Weight key.
        activation_key: Activation key; None for 16-bit activations.
    """

    experts: type[GroupedExperts]
    config: FusedMoEConfig
    key: QuantKey
    activation_key: QuantKey | None = None

    def made(self, device: torch.device) -> GroupedExperts:
        """Instantiate the experts, for sm_90 if there is no GPU.

        Args:
            device: Device of the tensors.

        Returns:
            The instance.
        """
        target = DeviceInfo.current(device) if device.type == "cuda" else DeviceInfo.parse("sm90")
        return self.experts(self.config, weight_key=self.key, activation_key=self.activation_key, device=target)

    def check(
        self,
        device: torch.device,
        *,
        tiles: bool = False,
        tokens: int = 1,
        ids: Tensor | None = None,
        change: Callable[[Tensor], object] = lambda x: None,
        made: GroupedExperts | None = None,
        finite: bool = True,
        routing: str = "uniform",
    ) -> Tensor:
        """Run the layer in poisoned memory and check its output.

        Args:
            device: Device of the tensors.
            tiles: Whether the layer must use tiles; otherwise it must use matrix-vector products.
            tokens: Number of tokens.
            ids: Expert ids; None for those of `make_inputs`.
            change: Modifies x in place before the call.
            made: Instance of the experts; None makes one.
            finite: Whether to compare the output with the reference.
            routing: As for `make_inputs`.

        Returns:
            The output.

        Raises:
            AssertionError: The output is wrong, or the layer uses the other kind of kernel.
        """
        experts = self.made(device) if made is None else made
        weights = make_weights(self.config, self.key, self.activation_key, seed=3).to(device)
        inputs = make_inputs(self.config, tokens, seed=4, routing=routing)
        ids = inputs.topk_ids if ids is None else ids
        routed: dict[str, Any] = {"topk_weights": inputs.topk_weights.to(device), "topk_ids": ids.to(device)}
        if inputs.expert_map is not None:
            routed["expert_map"] = inputs.expert_map.to(device)
        workspace = Workspace(device).take(experts.workspaces(tokens))
        for tensor in workspace.values():
            tensor.view(torch.uint8).fill_(0xFF)
        x = inputs.x.to(device)
        change(x)
        out = torch.full_like(x, float("nan"))
        with patch.object(GemvLayer, "__call__", autospec=True, side_effect=GemvLayer.__call__) as called:
            experts.apply(out, x, experts.convert(weights), workspace=workspace, **routed)
        if called.called is tiles:
            raise AssertionError(f"expected {'tiles' if tiles else 'vectors'} for {tokens} tokens")
        if finite:
            expected_output(x, weights, self.config, **routed).compare(out, "result")
        return out
