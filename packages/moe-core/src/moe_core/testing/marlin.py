"""What Marlin-class kernels make of repacked weights, read off products with unit vectors or others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from moe_core.config import FusedMoEConfig
from moe_core.device import DeviceInfo
from moe_core.gemm.heuristics.gemv import GemvConfig
from moe_core.gemm.launch import Gemm, OperandA, Result, Routing, grouped_gemm
from moe_core.gemm.marlin.convert import Converted
from moe_core.gemm.marlin.gemv import GemvFunctions, GemvLayer, gemv
from moe_core.gemm.marlin.weight import Functions, MarlinMatrix
from moe_core.gemm.plan import TileConfig
from moe_core.gemm.workspaces import order_workspaces
from moe_core.gemm_experts.marlin import MarlinExperts
from moe_core.ops.sort import sort_pairs
from moe_core.quant_key import QuantKey
from moe_core.testing.data import make_inputs, make_weights
from moe_core.testing.tolerance import expected_output
from moe_core.workspace import Workspace


def dequantized_by_gemm(
    weight: Converted,
    bits: int,
    shape: tuple[int, int],
    functions: Functions,
    config: TileConfig,
    dtype: torch.dtype,
    x: float = 1.0,
) -> Tensor:
    """float32 ``shape`` [N, K]: one expert's ``weight``, of codes of ``bits``, times ``x`` in ``dtype``."""
    n, k = shape
    device = weight.words.device
    matrix = MarlinMatrix(weight.words, bits, n, k, weight.group_size, weight.scales, weight.channel_scales)
    workspace = Workspace(device).take(order_workspaces(k, k, 1, False))
    ids = torch.zeros(k, 1, dtype=torch.int32, device=device)
    rows = (x * torch.eye(k)).to(dtype).to(device)
    y = torch.empty(k, n, device=device)
    gemm = Gemm(
        config,
        matrix.gemm_weight(functions),
        OperandA((rows, rows.stride(0), k), "position"),
        Result.of(y),
        sort_pairs(ids, 1, config.block_m, workspace=workspace),
        Routing(ids, torch.ones(k, 1, device=device), 1),
    )
    grouped_gemm(gemm)
    return y.cpu().T


def multiplied_by_gemv(weight: Converted, bits: int, functions: GemvFunctions, n: int, x: Tensor) -> Tensor:
    """float32 [rows, N]: rows of ``x`` [rows, K] times one expert's ``weight``, of codes of ``bits``."""
    rows, k = x.shape
    matrix = MarlinMatrix(weight.words, bits, n, k, weight.group_size, weight.scales, weight.channel_scales)
    y = torch.empty(rows, n, device=x.device)
    ids = torch.zeros(rows, 1, dtype=torch.int32, device=x.device)
    routing = Routing(ids, torch.ones(rows, 1, device=x.device), 1)
    gemv(functions, x, matrix, y, routing, None, GemvConfig(128, 32, 4), pdl=False)
    return y


@dataclass(frozen=True)
class FewTokens:
    """A layer of Marlin-class ``experts`` that is called with few tokens."""

    experts: type[MarlinExperts]
    config: FusedMoEConfig
    key: QuantKey

    def made(self, device: torch.device) -> MarlinExperts:
        """The experts; where there is no GPU, as on sm_90."""
        target = DeviceInfo.current(device) if device.type == "cuda" else DeviceInfo.parse("sm90")
        return self.experts(self.config, weight_key=self.key, activation_key=None, device=target)

    def check(
        self,
        device: torch.device,
        *,
        tiles: bool = False,
        tokens: int = 1,
        ids: Tensor | None = None,
        change: Callable[[Tensor], object] = lambda x: None,
        made: MarlinExperts | None = None,
        finite: bool = True,
        routing: str = "uniform",
    ) -> Tensor:
        """The output for ``tokens``, after a ``change`` of x, in poisoned memory; ``routing`` as for `make_inputs`.

        Raises AssertionError unless it is as exact as is expected of it (or not ``finite``), and without tensor cores
        or, with ``tiles``, with them.
        """
        experts = self.made(device) if made is None else made
        weights = make_weights(self.config, self.key, None, seed=3).to(device)
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
