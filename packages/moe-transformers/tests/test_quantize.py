"""16-bit experts that transformers filled, quantized where they are."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import moe_core as mc
import pytest
import torch
from moe_core_transformers import tiny_model
from moe_transformers import MoeCoreExperts, quantize_experts
from moe_transformers.blocks import experts_modules
from moe_transformers.filled import Filled, top_k_of
from moe_transformers_models import TOP_K, E, K, N, qwen3
from torch import nn
from transformers import PreTrainedModel

TOKENS = 7
#: [E, 2N, K]; transposed and interleaved with biases and a limit; without a gate; transposed with biases
FAMILIES = ("qwen3_moe", "gpt_oss", "nemotron_h", "openai_privacy_filter")


def replaced(model: nn.Module) -> list[MoeCoreExperts]:
    return [module for module in model.modules() if isinstance(module, MoeCoreExperts)]


@pytest.mark.parametrize("quantize", ["fp8_per_channel_w8a16", "int8_per_channel_w8a16"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_quantized_experts_are_those_of_the_module(model_type: str, quantize: str) -> None:
    model = tiny_model(model_type)
    name, module = next(experts_modules(model))
    filled = Filled.of(module, name, top_k=top_k_of(module, name), dtype=torch.float32)
    weights = mc.registry().online(quantize).quantize(filled.weights().row_major())
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, filled.config.hidden_size, generator=generator)
    top, ids = torch.rand(TOKENS, filled.config.num_experts, generator=generator).topk(filled.config.top_k)
    expected = mc.fused_moe_reference(x, weights, filled.config, topk_weights=top, topk_ids=ids).float()
    quantize_experts(model, quantize)
    experts = model.get_submodule(name)
    assert isinstance(experts, MoeCoreExperts)
    with torch.no_grad():
        torch.testing.assert_close(experts(x, ids, top), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("quantize", ["fp8_per_channel", "fp8_per_block", "mxfp8", "int8_per_channel", "int4_g64"])
def test_models_run_and_generate(quantize: str) -> None:
    model = qwen3()
    tokens = torch.arange(10).reshape(2, 5)
    with torch.no_grad():
        exact = model(tokens).logits.float()
        quantize_experts(model, quantize)
        found = model(tokens).logits.float()
    # half a step of four bits is a fifteenth of a group's largest value; what is rounded more finely is nearer
    assert 0 < (found - exact).norm() < exact.norm() / 4
    assert model.generate(tokens, max_new_tokens=2, do_sample=False, pad_token_id=0).shape == (2, 7)
    assert model.get_experts_implementation()[""] == "moe_core"


def test_models_compile_in_one_graph() -> None:
    model = qwen3()
    quantize_experts(model, "fp8_per_channel")
    tokens = torch.arange(10).reshape(2, 5)
    torch.compiler.reset()
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(tokens, use_cache=False).logits, expected)


def test_each_modules_tensors_are_freed_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    model = qwen3(num_hidden_layers=3)
    tensors = [weakref.ref(tensor) for _, module in experts_modules(model) for tensor in module.parameters()]
    alive = []
    original = mc.FusedMoELayer.from_weights

    def from_weights(*arguments: Any, **named: Any) -> mc.FusedMoELayer:
        alive.append(sum(tensor() is not None for tensor in tensors))
        return original(*arguments, **named)

    monkeypatch.setattr(mc.FusedMoELayer, "from_weights", from_weights)
    quantize_experts(model, "fp8_per_channel")
    assert alive == [6, 4, 2]
    assert not any(tensor() is not None for tensor in tensors)


def test_biases_hold_on_to_nothing() -> None:
    model = tiny_model("gpt_oss")
    module = next(experts_modules(model))[1]
    before = {tensor.untyped_storage().data_ptr() for tensor in module.parameters()}
    quantize_experts(model, "fp8_per_channel")
    layer = replaced(model)[0].layer
    assert layer is not None
    assert layer.weights.quant_config.w2_bias is not None
    assert not before & {tensor.untyped_storage().data_ptr() for _, tensor in layer.weights.tensors()}


def test_reload_quantizes_as_before() -> None:
    model, other = qwen3(), qwen3(seed=1)
    weights = Filled.of(next(experts_modules(other))[1], "experts", top_k=TOP_K, dtype=torch.bfloat16).weights()
    quantize_experts(model, "fp8_per_channel")
    quantize_experts(other, "fp8_per_channel")
    mine, theirs = replaced(model)[0].layer, replaced(other)[0].layer
    assert mine is not None
    assert theirs is not None
    mine.reload(weights)
    for (_, found), (_, expected) in zip(mine.weights.tensors(), theirs.weights.tensors(), strict=True):
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


class TestRefused:
    """Before anything is quantized."""

    @pytest.fixture
    def model(self) -> PreTrainedModel:
        return qwen3()

    @staticmethod
    def untouched(model: nn.Module) -> bool:
        return len(list(experts_modules(model))) == 2 and not replaced(model)

    def test_a_later_layer(self, model: PreTrainedModel) -> None:
        model.model.layers[1].mlp.experts.act_fn = nn.Softsign()
        with pytest.raises(mc.ConfigError, match=r"model\.layers\.1\.mlp\.experts .*Softsign"):
            quantize_experts(model, "fp8_per_channel")
        assert self.untouched(model)

    def test_names(self, model: PreTrainedModel) -> None:
        with pytest.raises(mc.ConfigError, match="'fp8_per_chanel'.*'fp8_per_channel'"):
            quantize_experts(model, "fp8_per_chanel")
        with pytest.raises(mc.UnknownBackendError, match="tritom"):
            quantize_experts(model, "fp8_per_channel", backend="tritom")
        assert self.untouched(model)

    def test_what_no_backend_runs(self, model: PreTrainedModel) -> None:
        with pytest.raises(mc.SelectionError):
            quantize_experts(model, "fp8_per_channel", backend="deep_gemm")
        assert self.untouched(model)

    def test_models_without_such_experts(self, model: PreTrainedModel) -> None:
        with pytest.raises(mc.ConfigError, match="experts"):
            quantize_experts(nn.Linear(2, 2), "fp8_per_channel")
        quantize_experts(model, "fp8_per_channel")
        with pytest.raises(mc.ConfigError, match="experts"):
            quantize_experts(model, "fp8_per_channel")

    def test_going_back(self, model: PreTrainedModel) -> None:
        quantize_experts(model, "fp8_per_channel")
        model.set_experts_implementation("eager")
        tokens = torch.arange(4)[None]
        with torch.no_grad():
            with pytest.raises(mc.ConfigError, match="'eager'"):
                model(tokens)
            model.set_experts_implementation("moe_core")
            model(tokens)

    def test_saving(self, model: PreTrainedModel, tmp_path: Path) -> None:
        quantize_experts(model, "fp8_per_channel")
        for one in (model, model.model):
            with pytest.raises(mc.ConfigError, match="saved"):
                one.save_pretrained(tmp_path)
        assert not list(tmp_path.iterdir())
        with pytest.warns(mc.ExpertsLeftOutWarning):
            assert not [name for name in model.state_dict() if "experts" in name]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_state_dict_of_the_16_bit_model_replaces_experts(model_type: str) -> None:
    """Names and layout are transformers', whichever the family has."""
    model, other = tiny_model(model_type), tiny_model(model_type)
    with torch.no_grad():
        for _, module in experts_modules(other):
            for parameter in module.parameters():
                parameter.mul_(1.5)
    new = other.state_dict()
    for one in (model, other):
        quantize_experts(one, "int8_per_channel_w8a16")
    model.load_state_dict(new, strict=False)
    for mine, theirs in zip(replaced(model), replaced(other), strict=True):
        assert mine.layer is not None
        assert theirs.layer is not None
        for (_, found), (_, expected) in zip(mine.layer.weights.tensors(), theirs.layer.weights.tensors(), strict=True):
            assert torch.equal(found, expected)
    name = next(name for name in new if "experts." in name)
    for wrong in ({name: new[name]}, {name: new[name].to("meta")}, {f"{name}.lora_A.default.weight": new[name]}):
        with pytest.raises(mc.ConfigError, match="experts"):
            model.load_state_dict(wrong, strict=False)


@pytest.mark.parametrize("name", ["block_sparse_moe.experts.0.w1.weight", "moe.experts.gate_up_proj"])
def test_a_state_dict_with_experts_under_other_names_is_refused(name: str) -> None:
    """``strict=False`` would ignore them, and leave the old experts in place."""
    model = qwen3()
    quantize_experts(model, "int8_per_channel_w8a16")
    before = model.lm_head.weight.clone()
    given = {f"model.layers.0.{name}": torch.zeros(4, 4), "lm_head.weight": torch.zeros_like(before)}
    with pytest.raises(mc.ConfigError, match=name):
        model.load_state_dict(given, strict=False)
    assert torch.equal(model.lm_head.weight, before)


def test_top_k_may_be_given() -> None:
    model = qwen3()
    for _, module in experts_modules(model):
        module.config = type("Config", (), {"_experts_implementation": "moe_core"})()
    with pytest.raises(mc.ConfigError, match="top_k="):
        quantize_experts(model, "fp8_per_channel")
    quantize_experts(model, "fp8_per_channel", top_k=3)
    layer = replaced(model)[0].layer
    assert layer is not None
    assert (layer.config.top_k, layer.config.num_experts, layer.config.hidden_size) == (3, E, K)
    assert layer.config.intermediate_size == N
