"""On a GPU: the same bits as moe-core's layer, eagerly and in a CUDA graph, beside the codes of SGLang's tensors."""

from __future__ import annotations

import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from moe_sglang.fused import FusedFunction
from moe_sglang.kinds import KINDS
from moe_sglang_layers import HIDDEN, ROWS, TOP_K, E, config, dispatched, info_of, row_name, runner, weights_of

pytestmark = pytest.mark.gpu


def on_gpu(value: Any) -> Any:
    """Tensors of a record of SGLang's, on the GPU."""
    if isinstance(value, torch.Tensor):
        return value.cuda()
    if isinstance(value, tuple):
        return type(value)(*map(on_gpu, value))
    return value


@pytest.mark.parametrize("case", ROWS, ids=row_name)
def test_a_captured_call_is_bit_equal(
    sglang: types.SimpleNamespace, case: tuple[tuple[str, str], bool], said: list[str]
) -> None:
    row, static = case
    weights = weights_of(row, static, config())
    info = info_of(sglang, row, weights)
    info = replace(info, **{name: on_gpu(value) for name, value in vars(info).items()})
    tokens = on_gpu(dispatched(sglang, 1))
    left_to_sglang: list[object] = []
    function = FusedFunction(lambda *arguments: left_to_sglang.append(arguments), (KINDS[row].scheme,))
    eager = function(tokens, info, runner(sglang))
    if left_to_sglang:
        assert "needs a second copy" in said[0] or "no kernel fits" in said[0]
        return
    assert function.kernel is not None
    for name in ("w13", "w2"):
        mine, theirs = getattr(function.kernel.weights, name), getattr(info, f"{name}_weight")
        assert mine.untyped_storage().data_ptr() == theirs.untyped_storage().data_ptr()
    topk = tokens.topk_output
    direct = function.kernel.apply(tokens.hidden_states, topk_weights=topk.topk_weights, topk_ids=topk.topk_ids)
    assert torch.equal(eager.hidden_states, direct)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = function(tokens, info, runner(sglang)).hidden_states
    tokens.hidden_states.copy_(torch.randn(1, HIDDEN, device="cuda"))
    topk.topk_ids.copy_(torch.randperm(E, device="cuda")[:TOP_K].int()[None])
    graph.replay()
    expected = function.kernel.apply(tokens.hidden_states, topk_weights=topk.topk_weights, topk_ids=topk.topk_ids)
    assert torch.equal(captured, expected)
