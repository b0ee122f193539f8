"""The module in a block's place for its experts."""

from __future__ import annotations

import moe_core as mc
import pytest
import torch
from moe_transformers import MoeCoreExperts
from torch import Tensor

E, TOP_K, K, N, TOKENS = 4, 2, 256, 128, 6


@pytest.fixture(scope="module")
def layer() -> mc.FusedMoELayer:
    generator = torch.Generator().manual_seed(0)
    config = mc.FusedMoEConfig(num_experts=E, top_k=TOP_K, hidden_size=K, intermediate_size=N)
    w13, w2 = (torch.randn(E, *shape, generator=generator) / 16 for shape in ((2 * N, K), (K, N)))
    weights = mc.quantize_moe_weights(w13, w2, gated=True, weight_key=mc.kFp8Static128BlockSym)
    return mc.FusedMoELayer.from_weights("fp8", config, weights, copy=True)


@pytest.fixture
def call() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, ids and weights as transformers' routers make them."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, K, generator=generator).bfloat16()
    weights, ids = torch.rand(TOKENS, E, generator=generator).topk(TOP_K)
    return x, ids, weights.bfloat16()


def test_is_the_layer_with_the_blocks_routing(layer: mc.FusedMoELayer, call: tuple[Tensor, Tensor, Tensor]) -> None:
    x, ids, weights = call
    expected = layer(x, topk_weights=weights.float(), topk_ids=ids)
    assert expected.abs().max() > 0
    assert torch.equal(MoeCoreExperts(layer)(x, ids, weights), expected)


def test_leading_dimensions_stay(layer: mc.FusedMoELayer, call: tuple[Tensor, Tensor, Tensor]) -> None:
    experts = MoeCoreExperts(layer)
    output = experts(*(tensor.reshape(2, TOKENS // 2, -1) for tensor in call))
    assert torch.equal(output.reshape(TOKENS, K), experts(*call))


def test_ids_of_no_expert_select_nothing(layer: mc.FusedMoELayer, call: tuple[Tensor, Tensor, Tensor]) -> None:
    x, ids, weights = call
    assert not MoeCoreExperts(layer)(x, torch.full_like(ids, E), weights).any()


def test_gradients_are_refused(layer: mc.FusedMoELayer, call: tuple[Tensor, Tensor, Tensor]) -> None:
    x, ids, weights = call
    with pytest.raises(mc.TensorError, match="hidden_states requires grad, and the experts are for inference only"):
        MoeCoreExperts(layer)(x.requires_grad_(), ids, weights)


def test_state_dict_refuses_experts(layer: mc.FusedMoELayer) -> None:
    with pytest.raises(mc.ConfigError, match="cannot hold the experts of layer"):
        MoeCoreExperts(layer).state_dict()
