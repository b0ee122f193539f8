"""Which activations the kernels without tensor cores can read."""

from __future__ import annotations

from dataclasses import replace

import torch
from moe_core.gemm.launch import Activation
from moe_core.gemm.marlin.gemv import GemvFunctions, GemvLayer
from moe_core.gemm.marlin.weight import MarlinMatrix


def test_activations_are_read_two_at_a_time() -> None:
    words, scales = torch.zeros(1, 8, 32, dtype=torch.int32), torch.ones(1, 1, 8)
    even, odd = (MarlinMatrix(words, 8, 8, columns, -1, scales) for columns in (32, 31))
    x = torch.zeros(2, 64, dtype=torch.bfloat16)

    def reads_gemv(x: torch.Tensor, w13: MarlinMatrix, w2: MarlinMatrix) -> bool:
        return GemvLayer(GemvFunctions(None, "row"), w13, w2, Activation("silu")).reads(x)

    assert reads_gemv(x[:, :32], even, even)
    assert not reads_gemv(x[:, 1:33], even, even)
    assert not reads_gemv(x[:, :31], odd, even)
    assert not reads_gemv(torch.zeros(2, 33, dtype=torch.bfloat16)[:, :32], even, even)
    assert not reads_gemv(x[:, :32], even, replace(even, index=torch.zeros(1, 32, dtype=torch.int32)))
    assert not reads_gemv(x[:, :32], replace(even, pre_scales=torch.ones(1, 32)), even)
