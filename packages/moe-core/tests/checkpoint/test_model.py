from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import ActivationParams, CheckpointError, MoEActivation, RoutingConfig, RoutingMethodType
from moe_core.checkpoint import Checkpoint, LayerModel, find_layer, read_model
from moe_core_checkpoints import CONFIG, TOP_K, E, K, N, expert_tensors, write
from torch import Tensor

DEEPSEEK = {"n_group": 2, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
SIZES = {"num_experts_per_tok": TOP_K, "hidden_size": K, "hidden_act": "silu"}
OLD = {"num_local_experts": E, "intermediate_size": N, **SIZES}
NEW = {"num_experts": E, "moe_intermediate_size": N, "intermediate_size": 7, **SIZES}
ROUTED = {"n_routed_experts": E, "moe_intermediate_size": N, "intermediate_size": 7, **SIZES}


def model(folder: Path, config: dict[str, Any], extra: dict[str, Tensor] | None = None, **naming: Any) -> LayerModel:
    tensors = {**expert_tensors(**naming), **(extra or {})}
    return read_model(find_layer(Checkpoint.open(write(folder, tensors, config))))


def bias(name: str = "gate.e_score_correction_bias", block: str = "model.layers.0.mlp") -> dict[str, Tensor]:
    return {f"{block}.{name}": torch.arange(E, dtype=torch.float32)}


FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Tensor], RoutingConfig]] = {
    "qwen3_moe": ({**NEW, "norm_topk_prob": True}, {}, RoutingConfig()),
    "qwen2_moe": ({**NEW}, {}, RoutingConfig(renormalize=False)),
    "olmoe": ({"num_experts": E, "intermediate_size": N, **SIZES}, {}, RoutingConfig(renormalize=False)),
    "qwen3_next": (NEW, {}, RoutingConfig()),
    "mixtral": (OLD, {}, RoutingConfig()),
    "granitemoe": (OLD, {}, RoutingConfig(score_selected_only=True)),
    "gpt_oss": (OLD, {}, RoutingConfig(score_selected_only=True)),
    "deepseek_v2": (
        {**ROUTED, **DEEPSEEK, "topk_method": "group_limited_greedy", "norm_topk_prob": False},
        {},
        RoutingConfig(renormalize=False, num_expert_group=2, topk_group=1, routed_scaling_factor=2.5),
    ),
    "deepseek_v3": (
        {**ROUTED, **DEEPSEEK},
        bias(),
        RoutingConfig("sigmoid", True, False, 2, 1, 2.5, has_correction_bias=True),
    ),
    "kimi_k2": (
        {**ROUTED, **DEEPSEEK, "n_group": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        bias(),
        RoutingConfig("sigmoid", routed_scaling_factor=2.5, has_correction_bias=True),
    ),
    "glm4_moe": (
        {**ROUTED, **DEEPSEEK, "n_group": 1},
        bias(),
        RoutingConfig("sigmoid", routed_scaling_factor=2.5, has_correction_bias=True),
    ),
    "minimax_m2": (
        {**OLD, "scoring_func": "sigmoid", "use_routing_bias": True},
        bias("e_score_correction_bias"),
        RoutingConfig("sigmoid", has_correction_bias=True),
    ),
    "ernie4_5_moe": (
        {"moe_num_experts": E, "moe_k": TOP_K, "hidden_size": K, "hidden_act": "silu", "moe_intermediate_size": N},
        {"model.layers.0.mlp.moe_statics.e_score_correction_bias": torch.arange(E).float()[None]},
        RoutingConfig(has_correction_bias=True),
    ),
    "lfm2_moe": (
        {**NEW, "use_expert_bias": False, "norm_topk_prob": True},
        {},
        RoutingConfig("sigmoid"),
    ),
    "llama4_text": (
        {**OLD, "num_experts_per_tok": 1},
        {},
        RoutingConfig("sigmoid", renormalize=False, score_selected_only=True),
    ),
    "deepseek_v4": (
        {**ROUTED, "norm_topk_prob": True, "scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5},
        bias("gate.bias"),
        RoutingConfig("sqrtsoftplus", routed_scaling_factor=1.5, has_correction_bias=True),
    ),
}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_families(tmp_path: Path, model_type: str) -> None:
    config, extra, routing = FAMILIES[model_type]
    found = model(tmp_path, {"model_type": model_type, **config}, extra)
    assert found.config.routing == routing
    assert found.config.routing is not None
    assert (found.config.num_experts, found.config.hidden_size, found.config.intermediate_size) == (E, K, N)
    assert found.config.top_k == (1 if model_type == "llama4_text" else TOP_K)
    assert found.config.apply_router_weight_on_input is (model_type == "llama4_text")
    swigluoai = model_type == "gpt_oss"
    assert found.config.activation is (MoEActivation.SWIGLUOAI if swigluoai else MoEActivation.SILU)
    if routing.has_correction_bias:
        assert found.correction_bias is not None
        assert found.correction_bias.tolist() == list(range(E))
        assert found.correction_bias.dtype is torch.float32
    else:
        assert found.correction_bias is None
    assert found.routing_reason is None


def test_methods_have_the_names_that_kernels_know(tmp_path: Path) -> None:
    names = {
        "qwen3_moe": RoutingMethodType.RenormalizeNaive,
        "qwen2_moe": RoutingMethodType.Default,
        "gpt_oss": RoutingMethodType.Renormalize,
        "deepseek_v3": RoutingMethodType.DeepSeekV3,
        "minimax_m2": RoutingMethodType.MiniMax2,
        "llama4_text": RoutingMethodType.Llama4,
        "deepseek_v4": RoutingMethodType.DeepseekV4,
    }
    for model_type, method in names.items():
        config, extra, _ = FAMILIES[model_type]
        routing = model(tmp_path / model_type, {"model_type": model_type, **config}, extra).config.routing
        assert routing is not None
        assert routing.method is method


def test_unknown_family_goes_by_its_keys(tmp_path: Path) -> None:
    config = {"model_type": "new_moe", **NEW, "norm_topk_prob": False}
    assert model(tmp_path / "a", config).config.routing == RoutingConfig(renormalize=False)
    found = model(tmp_path / "b", {**config, **DEEPSEEK}, bias())
    assert found.config.routing == RoutingConfig("sigmoid", True, False, 2, 1, 2.5, has_correction_bias=True)


def test_what_is_assumed_of_an_unknown_family_is_noted(tmp_path: Path) -> None:
    config = {"model_type": "new_moe", **NEW, "norm_topk_prob": True}
    note = model(tmp_path / "a", config).routing_note
    assert note is not None
    assert "model_type 'new_moe' is not known, and no scoring_func says" in note
    assert "assumed to be softmax over all experts with renormalisation" in note
    note = model(tmp_path / "b", {**config, "norm_topk_prob": False}, bias()).routing_note
    assert note is not None
    assert "sigmoid over all experts, chosen with a correction bias, with no renormalisation" in note
    # nothing is assumed where config.json names it, or the family is known
    assert model(tmp_path / "c", {**config, "scoring_func": "softmax"}).routing_note is None
    assert model(tmp_path / "d", {**config, "model_type": "qwen3_moe"}).routing_note is None


def test_unknown_routing_is_not_guessed(tmp_path: Path) -> None:
    found = model(tmp_path / "a", {"model_type": "new_moe", **NEW})
    assert found.config.routing is None
    assert found.routing_reason is not None
    assert "model_type 'new_moe' is not known" in found.routing_reason
    found = model(tmp_path / "b", {"model_type": "phimoe", **OLD})
    assert found.routing_reason is not None
    assert "SparseMixer" in found.routing_reason


def test_nested_text_config(tmp_path: Path) -> None:
    nested = {"model_type": "qwen3_vl_moe", "hidden_size": 5, "text_config": {**NEW, "model_type": "qwen3_vl_moe_text"}}
    assert model(tmp_path, nested).config.routing == RoutingConfig()


def test_values_per_layer(tmp_path: Path) -> None:
    config = {"model_type": "hunyuan_v1_moe", **NEW, "num_experts": [E, 99], "moe_topk": [TOP_K, 9]}
    del config["num_experts_per_tok"]
    assert model(tmp_path, config).config.top_k == TOP_K


def test_non_gated_experts(tmp_path: Path) -> None:
    config = {**ROUTED, **DEEPSEEK, "model_type": "nemotron_h", "mlp_hidden_act": "relu2", "n_group": 1}
    del config["hidden_act"]
    found = model(
        tmp_path,
        config,
        bias(block="backbone.layers.0.mixer"),
        block="backbone.layers.0.mixer",
        names=("up_proj", "down_proj"),
    )
    assert found.config.activation is MoEActivation.RELU2_NO_MUL
    assert found.config.w13_rows == N


def test_latent_experts_work_on_the_latent_size(tmp_path: Path) -> None:
    config = {**ROUTED, **DEEPSEEK, "model_type": "nemotron_h", "hidden_size": 4 * K, "moe_latent_size": K}
    gate = {"model.layers.0.mlp.gate.weight": torch.zeros(E, 4 * K)}
    found = model(tmp_path, config, {**bias(), **gate})
    assert found.config.hidden_size == K
    assert found.router_weight is None


@pytest.mark.parametrize(
    ("entries", "params"),
    [
        ({}, None),
        ({"swiglu_limit": 7.0}, ActivationParams(limit=7.0)),
        ({"swiglu_limit": 5}, ActivationParams(limit=5.0)),
        ({"swiglu_limit": None}, ActivationParams(limit=math.inf)),
        ({"swiglu_alpha": 1.5, "swiglu_limit": 3}, ActivationParams(alpha=1.5, limit=3.0)),
    ],
)
def test_activation_parameters(tmp_path: Path, entries: dict[str, Any], params: ActivationParams | None) -> None:
    folder = write(tmp_path, expert_tensors(), {"model_type": "gpt_oss", **OLD})
    import json

    (folder / "config.json").write_text(json.dumps({"model_type": "gpt_oss", **OLD, **entries}))
    assert read_model(find_layer(Checkpoint.open(folder))).config.activation_params == params


@pytest.mark.parametrize("name", ["gate", "router", "router.layer", "gate.wg"])
def test_router(tmp_path: Path, name: str) -> None:
    gate = torch.randn(E, K).bfloat16()
    found = model(tmp_path, {"model_type": "mixtral", **OLD}, {f"model.layers.0.mlp.{name}.weight": gate})
    assert found.router_weight is not None
    assert torch.equal(found.router_weight, gate)
    assert found.router_bias is None


def test_router_bias(tmp_path: Path) -> None:
    for number, name in enumerate(("router.bias", "gate.bias")):
        found = model(tmp_path / str(number), {"model_type": "gpt_oss", **OLD}, bias(name))
        assert found.router_bias is not None
        assert found.router_bias.tolist() == list(range(E))
        assert found.correction_bias is None


def test_quantised_router_is_left_out(tmp_path: Path) -> None:
    gate = torch.zeros(E, K, dtype=torch.float8_e4m3fn)
    assert (
        model(tmp_path, {"model_type": "mixtral", **OLD}, {"model.layers.0.mlp.gate.weight": gate}).router_weight
        is None
    )


# ------------------------------------------------------------------ what is refused


def refused(folder: Path, message: str, config: dict[str, Any], extra: dict[str, Tensor] | None = None) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        model(folder, config, extra)
    assert str(folder) in str(caught.value) or "model.layers.0" in str(caught.value)


@pytest.mark.parametrize("key", ["num_experts", "num_experts_per_tok", "hidden_size", "hidden_act"])
def test_missing_entry(tmp_path: Path, key: str) -> None:
    config = {name: value for name, value in CONFIG.items() if name != key}
    refused(tmp_path, "config.json: has no", config)
    refused(tmp_path, key, config)


@pytest.mark.parametrize("key", ["num_experts", "num_experts_per_tok", "hidden_size", "moe_intermediate_size"])
@pytest.mark.parametrize("value", [0, -1, 2.0, "4", True, {}, 1 << 40])
def test_size_that_is_none(tmp_path: Path, key: str, value: object) -> None:
    refused(tmp_path, f"config.json: {key} is {value!r}, expected a positive integer", {**CONFIG, key: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_experts": E + 1},
            f"num_experts is {E + 1}, but model.layers.0.mlp.experts holds {E} experts: expert {E} is",
        ),
        ({"num_experts": E - 1}, f"num_experts is {E - 1}, but model.layers.0.mlp.experts holds {E} experts"),
        ({"num_local_experts": E + 1}, f"num_experts is {E}, but num_local_experts is {E + 1}"),
        ({"num_experts_per_tok": E + 1}, f"num_experts_per_tok is {E + 1}, more than the {E} experts of num_experts"),
        ({"hidden_act": "tanhshrink"}, "unknown activation 'tanhshrink'"),
        ({"hidden_act": "silu_no_mul"}, "the activation is silu_no_mul, but model.layers.0.mlp.experts has a gate"),
        ({"hidden_act": 7}, "hidden_act is 7, expected a name"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob is 'yes', expected true or false"),
        ({"routed_scaling_factor": "2"}, "routed_scaling_factor is '2', expected a number"),
        ({"routed_scaling_factor": math.inf}, "routed_scaling_factor is inf, expected a number"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor is 0, expected a number greater than 0"),
        ({"routed_scaling_factor": -0.5}, "routed_scaling_factor is -0.5, expected a number greater than 0"),
        ({"route_scale": 0.0}, "route_scale is 0.0, expected a number greater than 0"),
        ({"swiglu_limit": -1}, "limit must be positive"),
        ({"scoring_func": "argmax"}, "scoring_func 'argmax' is unknown"),
        ({"model_type": "deepseek_v3", "n_group": 3, "topk_group": 1}, "do not divide into num_expert_group 3"),
        ({"model_type": "deepseek_v3", "n_group": 2}, "has no topk_group"),
        ({"model_type": "deepseek_v3", "n_group": 2, "topk_group": 3}, "topk_group must be within"),
        ({"model_type": "deepseek_v3", "n_group": 4, "topk_group": 1}, "top_k 2 is larger than the 1 experts"),
    ],
)
def test_contradictions(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    refused(tmp_path, message, {**CONFIG, **changes}, bias())


def test_missing_correction_bias(tmp_path: Path) -> None:
    refused(tmp_path, "gate.e_score_correction_bias is missing", {"model_type": "deepseek_v3", **ROUTED, **DEEPSEEK})


def test_router_of_another_shape(tmp_path: Path) -> None:
    gate = {"model.layers.0.mlp.gate.weight": torch.zeros(E, K + 1)}
    refused(tmp_path, f"gate.weight is F32 [{E}, {K + 1}], expected [{E}, {K}]", CONFIG, gate)
    gate = {"model.layers.0.mlp.gate.weight": torch.zeros(E + 1, K)}
    refused(tmp_path, f"gate.weight is F32 [{E + 1}, {K}], expected [{E}, {K}]", CONFIG, gate)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_router_that_is_not_finite(tmp_path: Path, dtype: torch.dtype, value: float) -> None:
    gate = torch.zeros(E, K, dtype=dtype)
    gate[1, 2] = value
    name = "model.layers.0.mlp.gate.weight"
    refused(tmp_path, f"{name} holds NaN or Inf", CONFIG, {name: gate})


def test_correction_bias_that_is_none(tmp_path: Path) -> None:
    config = {"model_type": "deepseek_v3", **ROUTED, **DEEPSEEK}
    name = "model.layers.0.mlp.gate.e_score_correction_bias"
    refused(tmp_path, f"{name} is F32 [3], expected floating point [{E}]", config, {name: torch.zeros(3)})
    refused(tmp_path, f"{name} is I64 [{E}]", config, {name: torch.zeros(E, dtype=torch.int64)})
    refused(tmp_path, f"{name} holds NaN or Inf", config, {name: torch.full((E,), math.nan)})
