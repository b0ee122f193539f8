"""Products of Marlin-class kernels with repacked weights, to read the weights back."""

from __future__ import annotations

import torch
from moe_core.kernels.gemm.fragments.convert import Converted
from moe_core.kernels.gemm.gemv.plan import Product
from moe_core.kernels.gemm.marlin.gemv import GemvFunctions, MarlinGemvLayer
from moe_core.kernels.gemm.marlin.weight import Functions, MarlinMatrix
from moe_core.kernels.gemm.plan import GemvConfig, TileConfig
from moe_core.kernels.gemm.tiles.launch import Activation, Gemm, OperandA, Result, Routing, grouped_gemm
from moe_core.kernels.gemm.workspaces import order_workspaces
from moe_core.kernels.ops.sort import sort_pairs
from moe_core.spec.workspace import Workspace
from torch import Tensor


def dequantized_by_gemm(
    weight: Converted,
    bits: int,
    shape: tuple[int, int],
    functions: Functions,
    config: TileConfig,
    dtype: torch.dtype,
    x: float = 1.0,
) -> Tensor:
    """Multiply one expert's weight by a scaled identity matrix with the GEMM.

    Args:
        weight: Converted weight of one expert.
        bits: Bits of a code.
        shape: (N, K).
        functions: Device functions of the weight format.
        config: Tile configuration.
        dtype: Dtype of the rows.
        x: Scale of the identity matrix.

    Returns:
        The weight times ``x``, ``[N, K]`` float32.
    """
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
    """Multiply rows by one expert's weight with the GEMV.

    Args:
        weight: Converted weight of one expert.
        bits: Bits of a code.
        functions: Device functions of the weight format.
        n: Number of output columns N.
        x: Rows ``[rows, K]``.

    Returns:
        ``[rows, N]`` float32.
    """
    rows, k = x.shape
    matrix = MarlinMatrix(weight.words, bits, n, k, weight.group_size, weight.scales, weight.channel_scales)
    y = torch.empty(rows, n, device=x.device)
    ids = torch.zeros(rows, 1, dtype=torch.int32, device=x.device)
    routing = Routing(ids, torch.ones(rows, 1, device=x.device), 1)
    product = Product(x, y, routing, GemvConfig(128, 32, 4))
    MarlinGemvLayer(Activation(), functions, matrix, matrix).multiply(product)
    return y
