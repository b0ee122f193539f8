"""vLLM's own layers, whose experts are ours: equal to moe-core's own layer in every bit, and in one copy."""

from __future__ import annotations

import moe_core as mc
import pytest
import torch
from moe_core.engine_api import select_kernel
from moe_vllm.experts import MoeCoreExperts
from torch import Tensor
from vllm_formats import FORMATS, Format, Loaded
from vllm_layers import TOP_K, E, K, N, experts_of, fill, make_layer, moe_config, process, run

pytestmark = pytest.mark.usefixtures("brought")


def calls(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, router weights, experts."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, K, generator=generator).bfloat16()
    topk_weights, topk_ids = torch.rand(tokens, E, generator=generator).topk(TOP_K)
    return x, topk_weights, topk_ids.to(torch.int32)


def own_layer(form: Format, loaded: Loaded, device: str, **others: object) -> mc.FusedMoEKernel:
    """The same weights in moe-core, without vLLM."""
    config = mc.FusedMoEConfig(
        num_experts=E,
        top_k=TOP_K,
        hidden_size=K,
        intermediate_size=N,
        **{"activation": "silu", **form.layer, **others},  # type: ignore[arg-type]
    )
    weights = loaded.weights
    oracle = mc.oracle(form.scheme)
    selection = select_kernel(form.scheme, config, weights.weight_key, weights.activation_key, device=device)
    return oracle.make_kernel(selection, oracle.convert(selection, weights))


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str, device: str) -> None:
    form = FORMATS[name]
    layer = make_layer(form.config(), moe_config(**form.layer))
    assert issubclass(layer.quant_method.experts_cls, MoeCoreExperts)
    loaded = form.load()
    fill(layer, loaded.tensors)
    process(layer)
    x, topk_weights, topk_ids = calls(5)
    expected = own_layer(form, loaded, device).apply(x, topk_weights=topk_weights, topk_ids=topk_ids)
    assert torch.equal(run(layer, x, topk_weights, topk_ids), expected)

    held = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    weights = experts_of(layer)._kernel.weights
    assert {tensor.untyped_storage().data_ptr() for _, tensor in weights.tensors()} <= held
