"""Weights of more than 2**32 elements: a DeepSeek-V3 layer, whole."""

from __future__ import annotations

import pytest
import torch
from moe_core import FusedMoEConfig, MoEWeights, Oracle, kFp8Dynamic128Sym, kFp8Static128BlockSym
from moe_fp8.scheme import SCHEME

E, K, N, TOP_K = 256, 7168, 2048, 2


def codes(*shape: int) -> torch.Tensor:
    """Random e4m3 numbers without NaN, made in place: float32 would need four times the memory."""
    values = torch.empty(shape, dtype=torch.uint8, device="cuda").random_(0, 256)
    # without the highest exponent bit every magnitude is below 2, and no code is NaN
    return values.bitwise_and_(0xBF).view(torch.float8_e4m3fn)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [3, 8192])
def test_last_experts_are_found_beyond_four_giga_elements(tokens: int) -> None:
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GB of free GPU memory")
    torch.manual_seed(0)
    config = FusedMoEConfig(num_experts=E, top_k=TOP_K, hidden_size=K, intermediate_size=N)
    weights = MoEWeights(
        weight_key=kFp8Static128BlockSym,
        activation_key=kFp8Dynamic128Sym,
        w13=codes(E, 2 * N, K),
        w2=codes(E, K, N),
        w13_scale=torch.rand(E, 2 * N // 128, K // 128, device="cuda") / 64,
        w2_scale=torch.rand(E, K // 128, N // 128, device="cuda") / 64,
    )
    assert weights.w13.numel() > 2**32
    oracle = Oracle(SCHEME)
    x = torch.randn(tokens, K, device="cuda", dtype=torch.bfloat16)
    # all on the first and the last expert; 8192 tokens are enough for the kernel for many rows per expert
    topk_ids = torch.tensor([[E - 1, 0]], device="cuda", dtype=torch.int32).repeat(tokens, 1)
    topk_weights = torch.rand(tokens, TOP_K, device="cuda")
    results = {}
    for backend in ("triton", "torch"):
        selection = oracle.select(
            config,
            weight_key=weights.weight_key,
            activation_key=weights.activation_key,
            moe_backend=backend,
            device=x.device,
        )
        kernel = oracle.make_kernel(selection, oracle.convert(selection, weights))
        results[backend] = kernel.apply(x, topk_weights=topk_weights, topk_ids=topk_ids).double()
    error = (results["triton"] - results["torch"]).norm() / results["torch"].norm()
    # both round to bf16 (2^-9 each); the intermediate's e4m3 flips where the sums differ in the last bits
    assert float(error) < 2.0**-6
