"""What transformers' experts modules hold, of every family that dispatches them, against what they compute."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import ConfigError, MoEActivation, dequantize_weight, fused_moe_reference
from moe_core.checkpoint.config.families import family_of
from moe_core.checkpoint.config.keys import TOP_K
from moe_core_transformers import E, families, tiny_model
from moe_transformers.blocks import experts_modules
from moe_transformers.filled import Filled, top_k_of
from moe_transformers_models import K, fp8_experts
from torch import nn
from transformers import Qwen3MoeConfig

TOKENS = 17


#: families with experts that moe-core does not compute, and what is said of them
REFUSED = {
    "inkling2_text": r"layers\.0\.mlp\.experts .*gate_softcap",
    "muse_spark_text": r"layers\.0\.mlp\.experts .*norm",
}


def dispatching() -> list[str]:
    """Known families whose code has experts that the interface may compute."""
    found = []
    for name, config in families().items():
        file = Path(inspect.getfile(config))
        code = file.with_name(file.name.replace("configuration_", "modeling_"))
        known = family_of(name) is not None or name in REFUSED
        if known and code.exists() and "@use_experts_implementation" in code.read_text(encoding="utf-8"):
            found.append(name)
    return found


@pytest.mark.parametrize("model_type", [name for name in dispatching() if name not in REFUSED])
def test_weights_and_activation_are_the_modules(model_type: str) -> None:
    model = tiny_model(model_type)
    name, module = next(experts_modules(model))
    filled = Filled.of(module, name, top_k=top_k_of(module, name), dtype=torch.float32)
    assert filled.config.top_k == next(getattr(model.config, key) for key in TOP_K if hasattr(model.config, key))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, filled.config.hidden_size, generator=generator)
    weights, ids = torch.rand(TOKENS, filled.config.num_experts, generator=generator).topk(filled.config.top_k)
    with torch.no_grad():
        expected = module(x, ids, weights)
    output = fused_moe_reference(x, filled.weights(), filled.config, topk_weights=weights, topk_ids=ids)
    torch.testing.assert_close(output.float(), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_what_moe_core_does_not_compute_is_refused_by_name() -> None:
    # releases before have neither
    for model_type in set(REFUSED) & set(dispatching()):
        name, module = next(experts_modules(tiny_model(model_type)))
        with pytest.raises(ConfigError, match=REFUSED[model_type]):
            Filled.of(module, name, top_k=2, dtype=torch.float32)


class TestRefused:
    @pytest.fixture
    def module(self) -> nn.Module:
        return next(experts_modules(tiny_model("qwen3_moe")))[1]

    @staticmethod
    def fill(module: nn.Module) -> Filled:
        return Filled.of(module, "layers.0.experts", top_k=2, dtype=torch.float32)

    def test_soft_caps(self, module: nn.Module) -> None:
        module.gate_softcap = 10.0
        with pytest.raises(ConfigError, match=r"layers\.0\.experts .*gate_softcap"):
            self.fill(module)

    def test_a_function_of_no_name(self, module: nn.Module) -> None:
        module.act_fn = nn.Softsign()
        with pytest.raises(ConfigError, match="Softsign"):
            self.fill(module)

    def test_a_limit_that_only_the_code_knows(self, module: nn.Module) -> None:
        module._apply_gate = lambda x: module.act_fn(x.chunk(2, -1)[0].clamp(max=9.0)) * x.chunk(2, -1)[1]
        with pytest.raises(ConfigError, match="activation"):
            self.fill(module)

    def test_code_that_fails(self, module: nn.Module) -> None:
        module.act_fn = nn.Linear(3, 3)
        with pytest.raises(ConfigError, match=r"act_fn\.weight"):
            self.fill(module)
        module.act_fn = nn.Unflatten(1, (5, -1))
        with pytest.raises(ConfigError, match=r"layers\.0\.experts"):
            self.fill(module)

    def test_tensors_that_would_be_lost(self, module: nn.Module) -> None:
        module.register_parameter("norm", nn.Parameter(torch.ones(3)))
        with pytest.raises(ConfigError, match=r"layers\.0\.experts .*norm"):
            self.fill(module)

    def test_tensors_that_are_not_here(self, module: nn.Module) -> None:
        with pytest.raises(ConfigError, match=r"gate_up_proj .*layers\.0\.experts"):
            self.fill(module.to("meta"))

    def test_packed_fp4(self, module: nn.Module) -> None:
        module.down_proj = nn.Parameter(torch.zeros(E, 32, 12, dtype=torch.int8), requires_grad=False)
        with pytest.raises(ConfigError, match="FP4"):
            self.fill(module)

    def test_a_configuration_that_does_not_count(self, module: nn.Module) -> None:
        module.config = object()
        with pytest.raises(ConfigError, match="top_k="):
            top_k_of(module, "layers.0.experts")


def test_a_block_of_gate_and_up_is_repeated_for_each() -> None:
    """As transformers quantizes them on the fly: 192 rows of each, three blocks of 128 for both."""
    config = Qwen3MoeConfig(hidden_size=K, moe_intermediate_size=192, num_experts=2)
    module = fp8_experts(config, block_size=(128, 128))
    filled = Filled.of(module, "experts", top_k=1, dtype=torch.bfloat16)
    weights = filled.weights()
    weights.validate(filled.config)
    assert weights.shared, "a kernel would hold the model's parameters twice"
    assert weights.w13_scale is not None
    found = dequantize_weight(weights.w13, weights.w13_scale, weights.weight_key, parts=2)
    scale = module.gate_up_proj_scale_inv.repeat_interleave(128, 1).repeat_interleave(128, 2)
    assert torch.equal(found, module.gate_up_proj.float() * scale)


@pytest.mark.parametrize("settings", [{"block_size": (128, 128)}, {"activation_scheme": "static"}], ids=str)
def test_fp8_experts_without_a_gate(settings: dict[str, Any]) -> None:
    """Nemotron-H: static scales of the first projection have the name of those with a gate."""
    config = Qwen3MoeConfig(hidden_size=K, moe_intermediate_size=192, num_experts=2, hidden_act="relu2")
    module = fp8_experts(config, has_gate=False, **settings)
    filled = Filled.of(module, "experts", top_k=1, dtype=torch.bfloat16)
    assert filled.config.activation is MoEActivation.RELU2_NO_MUL
    weights = filled.weights()
    weights.validate(filled.config)
    own = {tensor.data_ptr() for tensor in module.parameters()}
    assert weights.w13.data_ptr() == module.up_proj.data_ptr()
    assert {tensor.data_ptr() for _, tensor in weights.tensors()} == own
