"""Layers that run while other processes have the same GPU, which stops each of them in the middle of its kernels."""

from __future__ import annotations

import time

import torch
from moe_core import registry
from moe_core_layers import Kind

#: calls between two looks at the results: the GPU has work for several turns of the processes
_CALLS = 40
#: most cycles that work of others, which this stands for, keeps the GPU busy before a call
_CYCLES = 2_000_000


def differing_calls(kind: Kind, tokens: int, seconds: float) -> tuple[int, list[str]]:
    """(calls, what is wrong in which): equal calls of a layer, for so many seconds behind the first."""
    config = kind.config(num_experts=5, dtype=torch.bfloat16, intermediate_size=512)
    oracle = registry().oracle(kind.scheme)
    selection = oracle.select(
        config, weight_key=kind.weight_key, activation_key=kind.activation_key, device=torch.device("cuda")
    )
    kernel = oracle.make_kernel(selection, oracle.convert(selection, kind.weights(config).to("cuda")))
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(tokens, config.hidden_size, generator=generator).bfloat16().cuda()
    weights, ids = torch.rand(tokens, 8, generator=generator).topk(2)
    ids = torch.where(ids < config.num_experts, ids, -1).int().cuda()
    given = {"topk_weights": weights.cuda(), "topk_ids": ids}
    first = kernel.apply(x, **given)
    torch.cuda.synchronize()
    calls, wrong, end = 0, list[str](), time.monotonic() + seconds
    while time.monotonic() < end:
        outputs = []
        for cycles in torch.randint(1, _CYCLES, (_CALLS,), generator=generator).tolist():
            torch.cuda._sleep(cycles)
            outputs.append(kernel.apply(x, **given))
        differ = torch.stack([(output != first).sum() for output in outputs]).tolist()
        wrong += [f"call {calls + i}: {count} elements" for i, count in enumerate(differ) if count]
        calls += _CALLS
    return calls, wrong
