from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import ActivationParams, CheckpointError, ConfigError, MoEActivation, RoutingConfig, RoutingMethodType
from moe_core.checkpoint import PER_CALL, Checkpoint, LayerModel, ModelSettings, find_layer, read_model
from moe_core.checkpoint.config.families import FAMILIES, REFUSED
from moe_core_checkpoints import CONFIG, TOP_K, E, K, N, expert_tensors, write
from torch import Tensor

DEEPSEEK = {"n_group": 2, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
SIZES = {"num_experts_per_tok": TOP_K, "hidden_size": K, "hidden_act": "silu"}
OLD = {"num_local_experts": E, "intermediate_size": N, **SIZES}
V3 = {"model_type": "deepseek_v3", "n_group": 1}
NEW = {"num_experts": E, "moe_intermediate_size": N, "intermediate_size": 7, **SIZES}
ROUTED = {"n_routed_experts": E, "moe_intermediate_size": N, "intermediate_size": 7, **SIZES}


def model(folder: Path, config: dict[str, Any], extra: dict[str, Tensor] | None = None, **naming: Any) -> LayerModel:
    given = naming.pop("settings", None)
    tensors = {**expert_tensors(**naming), **(extra or {})}
    if config.get("model_type") == "gpt_oss":
        tensors |= expert_biases()
    return read_model(find_layer(Checkpoint.open(write(folder, tensors, config))), settings=given)


def expert_biases() -> dict[str, Tensor]:
    return {name.replace(".weight", ".bias"): weight[:, 0].clone() for name, weight in expert_tensors().items()}


def bias(name: str = "gate.e_score_correction_bias", block: str = "model.layers.0.mlp") -> dict[str, Tensor]:
    return {f"{block}.{name}": torch.arange(E, dtype=torch.float32)}


SEVERAL: dict[str, tuple[dict[str, Any], dict[str, Tensor], RoutingConfig]] = {
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
    # DeepSeek-VL2: DeepSeek-V3's router under the older name
    "deepseek_vl_v2": (
        {**ROUTED, **DEEPSEEK, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        bias(),
        RoutingConfig("sigmoid", True, False, 2, 1, 2.5, has_correction_bias=True),
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
    # MiMo-V2.6-Pro's entries
    "mimo_v2": (
        {**ROUTED, "n_group": 1, "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
        | {"routed_scaling_factor": None, "attention_value_scale": 0.612},
        bias(),
        RoutingConfig("sigmoid", has_correction_bias=True),
    ),
    "minimax_m2": (
        {**OLD, "scoring_func": "sigmoid", "use_routing_bias": True, "layernorm_mlp_beta": 1.0},
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
        {**ROUTED, "norm_topk_prob": True, "scoring_func": "sqrtsoftplus", "num_hash_layers": 0, "swiglu_limit": 0},
        bias("gate.bias"),
        RoutingConfig("sqrtsoftplus", routed_scaling_factor=1.5, has_correction_bias=True),
    ),
}


def test_steps_router_names_its_correction_bias_otherwise(tmp_path: Path) -> None:
    found = model(tmp_path, {"model_type": "step3p5", **ROUTED}, bias("router_bias"))
    assert found.config.routing == RoutingConfig("sigmoid", has_correction_bias=True)
    assert found.config.activation is MoEActivation.SWIGLUSTEP
    assert torch.equal(found.correction_bias, torch.arange(E).float())


@pytest.mark.parametrize("model_type", SEVERAL)
def test_families(tmp_path: Path, model_type: str) -> None:
    config, extra, routing = SEVERAL[model_type]
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
        config, extra, _ = SEVERAL[model_type]
        routing = model(tmp_path / model_type, {"model_type": model_type, **config}, extra).config.routing
        assert routing is not None
        assert routing.method is method


def test_unknown_family_is_refused(tmp_path: Path) -> None:
    config = {"model_type": "mixtrel", **OLD}
    refused(tmp_path / "a", "model_type 'mixtrel' is not known; did you mean 'mixtral'?", config)
    refused(tmp_path / "b", "config.json: has no model_type", OLD)


@pytest.mark.parametrize("value", [7, ["qwen3_moe"], {}, True, None])
def test_model_type_that_is_no_name(tmp_path: Path, value: object) -> None:
    folder = write(tmp_path, expert_tensors(), NEW)
    (folder / "config.json").write_text(json.dumps({**NEW, "model_type": value}))
    given = ModelSettings(RoutingConfig(), "silu", assume=True)
    with pytest.raises(CheckpointError, match=re.escape(f"model_type is {value!r}")):
        read_model(find_layer(Checkpoint.open(folder)), settings=given)


def test_unknown_family_by_hand(tmp_path: Path) -> None:
    config = {"model_type": "new_moe", **NEW, "hidden_act": "not_one", "swiglu_alpha": 3.0}
    params = ActivationParams(alpha=2.0)
    given = ModelSettings("sigmoid,has_correction_bias", "swigluoai", params)
    found = model(tmp_path / "a", config, bias(), settings=given)
    assert found.config.routing == RoutingConfig("sigmoid", renormalize=False, has_correction_bias=True)
    assert (found.config.activation, found.config.activation_params) == (MoEActivation.SWIGLUOAI, params)
    assert (found.assumed, found.routing_reason) == (None, None)
    assert found.correction_bias is not None
    found = model(tmp_path / "b", config, settings=ModelSettings(PER_CALL, "silu"))
    assert (found.config.routing, found.routing_reason) == (None, "routing was left to each call")


def test_what_is_given_wins(tmp_path: Path) -> None:
    given = ModelSettings(RoutingConfig("sigmoid"), "gelu")
    found = model(tmp_path / "a", {"model_type": "qwen3_moe", **NEW, "norm_topk_prob": False}, settings=given)
    assert (found.config.routing, found.config.activation) == (RoutingConfig("sigmoid"), MoEActivation.GELU)
    with pytest.raises(ConfigError, match="activation_params"):
        ModelSettings(activation_params=ActivationParams(limit=1.0))
    with pytest.raises(ConfigError, match="top_k 2 "):
        model(
            tmp_path / "b",
            {"model_type": "qwen3_moe", **NEW},
            settings=ModelSettings("softmax,num_expert_group=4,topk_group=1"),
        )


def test_unknown_family_goes_by_its_keys_where_that_is_accepted(tmp_path: Path) -> None:
    config, given = {"model_type": "new_moe", **NEW, "norm_topk_prob": False}, ModelSettings(assume=True)
    assert model(tmp_path / "a", config, settings=given).config.routing == RoutingConfig(renormalize=False)
    found = model(tmp_path / "b", {**config, **DEEPSEEK}, bias(), settings=given)
    assert found.config.routing == RoutingConfig("sigmoid", True, False, 2, 1, 2.5, has_correction_bias=True)


def test_what_is_assumed_of_an_unknown_family_is_noted(tmp_path: Path) -> None:
    config, given = {"model_type": "new_moe", **NEW, "norm_topk_prob": True}, ModelSettings(assume=True)
    assumed = str(model(tmp_path / "a", config, settings=given).assumed)
    assert "model_type 'new_moe' is not known; routing is assumed to be softmax over all experts with renorm" in assumed
    assert "and the activation is assumed to be silu" in assumed
    assumed = str(model(tmp_path / "b", {**config, "norm_topk_prob": False}, bias(), settings=given).assumed)
    assert "sigmoid over all experts, chosen with a correction bias, with no renormalization" in assumed
    # only what is not given is guessed
    assumed = str(model(tmp_path / "c", config, settings=ModelSettings("softmax", assume=True)).assumed)
    assert assumed.endswith("is not known; the activation is assumed to be silu")
    assert model(tmp_path / "d", {**config, "model_type": "qwen3_moe"}, settings=given).assumed is None
    # what the guess can't be made of is left to each call
    found = model(tmp_path / "e", {"model_type": "new_moe", **NEW}, settings=given)
    assert found.config.routing is None
    assert "no norm_topk_prob says how it routes" in str(found.routing_reason)


@pytest.mark.parametrize(("model_type", "reason"), REFUSED.items())
def test_families_that_are_refused_say_why(tmp_path: Path, model_type: str, reason: str) -> None:
    config = {"model_type": model_type, **NEW}
    refused(tmp_path / "a", f"models of type {model_type!r} are not supported: {reason}", config)
    (tmp_path / "b").mkdir()
    write(tmp_path / "b", {"layers.0.ffn.w1": torch.zeros(2)}, config)
    with pytest.raises(CheckpointError, match=re.escape(f"{reason}")):
        find_layer(Checkpoint.open(tmp_path / "b"))


@pytest.mark.parametrize("model_type", [name for name, family in FAMILIES.items() if family.per_call])
def test_routing_that_is_not_computed_here(tmp_path: Path, model_type: str) -> None:
    found = model(tmp_path, {"model_type": model_type, **NEW})
    assert found.config.routing is None
    assert str(FAMILIES[model_type].per_call) in str(found.routing_reason)


@pytest.mark.parametrize(
    ("model_type", "entries", "message"),
    [
        ("mixtral", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("afmoe", {"route_norm": False}, "route_norm"),
        ("afmoe", {"n_group": 2, "topk_group": 1}, "n_group"),
        ("qwen3_moe", {"routed_scaling_factor": 2.0}, "routed_scaling_factor"),
        ("qwen3_moe", {"scoring_func": "sigmoid"}, "scoring_func"),
        ("qwen3_moe", {"topk_method": "noaux_tc"}, "topk_method"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method"),
        ("deepseek_v3", {"topk_method": "best"}, "topk_method"),
        ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias"),
        ("laguna", {"moe_apply_router_weight_on_input": True}, "moe_apply_router_weight_on_input"),
        ("gpt_oss", {"hidden_act": "gelu"}, "gelu, but"),
        ("deepseek_v3", {"norm_topk_prob": None}, "norm_topk_prob"),
        ("kimi_k2", {}, "route_norm"),
        ("kimi_k2", {"norm_topk_prob": True, "n_group": 1}, "kimi_k2"),
    ],
)
def test_entries_that_contradict_the_family(
    tmp_path: Path, model_type: str, entries: dict[str, Any], message: str
) -> None:
    folder = write(tmp_path, {**expert_tensors(), **(bias() if FAMILIES[model_type].correction_bias else {})}, NEW)
    small = {"n_group": 1} if "n_group" in FAMILIES[model_type].reads and model_type != "kimi_k2" else {}
    (folder / "config.json").write_text(json.dumps({**NEW, "model_type": model_type, **small, **entries}))
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read_model(find_layer(Checkpoint.open(folder)))


@pytest.mark.parametrize(
    "entries",
    [
        {"norm_topk_prob": True, "routed_scaling_factor": False, "n_group": False},
        {"routed_scaling_factor": 1.0, "n_group": 1, "scoring_func": "softmax", "topk_method": "greedy"},
        {"swiglu_limit": 0, "moe_router_logit_softcapping": 0.0, "final_logit_softcapping": 30.0, "rope_alpha": 2.0},
        # how text is generated, which transformers writes into parts of older files
        {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0},
    ],
)
def test_entries_that_say_what_the_family_does_anyway(tmp_path: Path, entries: dict[str, Any]) -> None:
    assert model(tmp_path, {"model_type": "mixtral", **OLD, **entries}).config.routing == RoutingConfig()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("swiglu_limit", 7.0),
        ("swiglu_alpha", 1.7),
        ("swiglu_beta", 1.0),
        ("mlp_gate_softcap", 4.0),
        ("expert_act_limits", [1.0, 1.0]),
        ("post_expert_norm", True),
        ("limit", 3.0),
        ("moe_router_logit_softcapping", 30.0),
        ("router_temperature", 2.0),
        ("num_hash_layers", 3),
        ("moe_norm_min", 0.5),
    ],
)
def test_entries_that_are_not_understood(tmp_path: Path, key: str, value: object) -> None:
    config = {"model_type": "mixtral", **OLD, key: value}
    refused(tmp_path / "a", f"{key} is {value!r}, which is unknown for model_type 'mixtral'", config)
    # what they stand for can be given
    given = ModelSettings("softmax,renormalize", "silu")
    assert model(tmp_path / "b", config, settings=given).config.routing == RoutingConfig()


@pytest.mark.parametrize(
    ("entries", "tensors"),
    [
        ({"mlp_layer_types": ["hash_moe", "moe"]}, ()),
        ({"num_hash_layers": 1}, ()),
        ({}, ()),
        ({"num_hash_layers": 0}, ("gate.weight", "gate.tid2eid")),
    ],
)
def test_hash_layers_are_left_to_each_call(tmp_path: Path, entries: dict[str, Any], tensors: tuple[str, ...]) -> None:
    beside = {f"model.layers.0.mlp.{name}": torch.zeros(E, K) for name in tensors}
    found = model(tmp_path, {"model_type": "deepseek_v4", **ROUTED, **entries}, beside)
    assert found.config.routing is None
    assert ("gate.tid2eid" if tensors else "chooses experts by the ids of the tokens") in str(found.routing_reason)


def test_entries_of_single_layers(tmp_path: Path) -> None:
    config = {"model_type": "qwen3_moe", **NEW, "per_layer_config": {"0": {"num_experts_per_tok": 3}, "1": {}}}
    assert model(tmp_path, config).config.top_k == 3


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
def test_entries_of_blocks(tmp_path: Path, nested: bool) -> None:
    """Nemotron Puzzle: a list of all layers, which alone may say how many experts there are."""
    shared = {name: value for name, value in NEW.items() if name not in ("num_experts", "num_experts_per_tok")}
    own = {"num_experts": E, "num_experts_per_tok": 3, "moe_intermediate_size": N}
    blocks = [{"block_type": "moe", **({"ffn": {"moe": own}} if nested else own)}, {"block_type": "mamba"}]
    config = {"model_type": "qwen3_moe", **shared, "moe_intermediate_size": 999, "block_configs": blocks}
    found = model(tmp_path / "a", config).config
    assert (found.num_experts, found.top_k, found.intermediate_size) == (E, 3, N)
    # a layer's own entries are closer than those of its kind of block
    config = {**config, "per_layer_config": {"0": {**own, "num_experts_per_tok": 1}}}
    assert model(tmp_path / "b", config).config.top_k == 1


def test_experts_per_token_that_are_given(tmp_path: Path) -> None:
    config = {"model_type": "qwen3_moe", **NEW}
    assert model(tmp_path / "a", config, settings=ModelSettings(top_k=3)).config.top_k == 3
    del config["num_experts_per_tok"]
    assert model(tmp_path / "b", config, settings=ModelSettings(top_k=1)).config.top_k == 1
    refused(tmp_path / "c", "moe_top_k or top_k_experts: give top_k (--top-k)", config)
    with pytest.raises(ConfigError, match="top_k .*99"):
        model(tmp_path / "d", config, settings=ModelSettings(top_k=99))
    for value in (0, -1, 1.5, True, "2"):
        with pytest.raises(ConfigError, match="top_k"):
            ModelSettings(top_k=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "gpt_oss", "lfm2_moe"])
def test_activation_without_an_entry(tmp_path: Path, model_type: str) -> None:
    config = {name: value for name, value in NEW.items() if name != "hidden_act"}
    found = model(tmp_path, {"model_type": model_type, **config}, bias() if model_type == "lfm2_moe" else None)
    expected = MoEActivation.SWIGLUOAI if model_type == "gpt_oss" else MoEActivation.SILU
    assert found.config.activation is expected


def test_defaults_of_the_family(tmp_path: Path) -> None:
    config = {"model_type": "deepseek_v3", **ROUTED, "n_routed_experts": 16}
    tensors = {"model.layers.0.mlp.gate.e_score_correction_bias": torch.zeros(16)}
    found = model(tmp_path / "a", config, tensors, experts=16)
    assert found.config.routing == RoutingConfig("sigmoid", True, False, 8, 4, 2.5, has_correction_bias=True)
    # null is not missing: no groups, no factor
    tiny = {**config, "n_group": None, "routed_scaling_factor": None}
    folder = write(tmp_path / "b", {**expert_tensors(experts=16), **tensors}, config)
    (folder / "config.json").write_text(json.dumps(tiny))
    found = read_model(find_layer(Checkpoint.open(folder)))
    assert found.config.routing == RoutingConfig("sigmoid", has_correction_bias=True)


def test_ling_1_and_ling_2_share_a_name(tmp_path: Path) -> None:
    config = {"model_type": "bailing_moe", **NEW, "norm_topk_prob": True}
    assert model(tmp_path / "1", config).config.routing == RoutingConfig()
    two = {**config, **DEEPSEEK, "score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    found = model(tmp_path / "2", two, bias("gate.expert_bias"))
    assert found.config.routing == RoutingConfig("sigmoid", True, False, 2, 1, 2.5, has_correction_bias=True)
    assert found.correction_bias is not None


def test_the_nearest_model_type_counts(tmp_path: Path) -> None:
    talker = {"model_type": "qwen3_omni_moe_talker", "text_config": NEW}
    config = {"model_type": "qwen3_omni_moe", "talker_config": talker}
    found = model(tmp_path / "a", config, block="talker.model.layers.0.mlp")
    assert found.config.routing == RoutingConfig(renormalize=False)
    # of those on the way, none may be anything but a name
    with pytest.raises(CheckpointError, match="model_type .*7"):
        model(tmp_path / "b", {**config, "model_type": 7}, block="talker.model.layers.0.mlp")


def test_stack_that_has_its_own_config(tmp_path: Path) -> None:
    text = {**NEW, "model_type": "qwen3_omni_moe_text"}
    talker = {**NEW, "model_type": "qwen3_omni_moe_talker_text", "num_experts_per_tok": 1}
    config = {
        "model_type": "qwen3_omni_moe",
        "thinker_config": {"model_type": "qwen3_omni_moe_thinker", "text_config": text},
        "talker_config": {"model_type": "qwen3_omni_moe_talker", "text_config": talker},
    }
    tensors = {**expert_tensors("thinker.model.layers.0.mlp"), **expert_tensors("talker.model.layers.0.mlp")}
    checkpoint = Checkpoint.open(write(tmp_path, tensors, config))
    found = read_model(find_layer(checkpoint)).config
    assert (found.top_k, found.routing) == (TOP_K, RoutingConfig())
    found = read_model(find_layer(checkpoint, stack="talker")).config
    assert (found.top_k, found.routing) == (1, RoutingConfig(renormalize=False))


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


#: of Kimi K3's config.json, whose language model counts as Kimi Linear
KIMI_K3: dict[str, Any] = {
    "num_experts": E,
    "num_experts_per_token": TOP_K,
    "hidden_size": 4 * K,
    "routed_expert_hidden_size": K,
    "latent_moe_use_norm": True,
    "moe_intermediate_size": N,
    "intermediate_size": 8 * N,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "routed_scaling_factor": 1.0,
    "num_expert_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_grouped_topk": True,
    "num_shared_experts": 2,
    "top_k": 50,
}


def kimi_k3(folder: Path, **changes: Any) -> LayerModel:
    block = "language_model.model.layers.1.block_sparse_moe"
    tensors = expert_tensors(block, names=("w1", "w3", "w2"))
    beside = {
        **bias(block=block),
        f"{block}.gate.weight": torch.zeros(E, 4 * K),
        f"{block}.routed_expert_down_proj.weight": torch.zeros(K, 4 * K),
        f"{block}.routed_expert_norm.weight": torch.zeros(K),
        f"{block}.routed_expert_up_proj.weight": torch.zeros(4 * K, K),
    }
    inner = {"model_type": "kimi_linear", **KIMI_K3, **changes}
    config = {"model_type": "kimi_k3", "text_config": inner}
    return read_model(find_layer(Checkpoint.open(write(folder, {**tensors, **beside}, config))))


def test_kimi_k3s_experts_work_on_a_size_of_their_own(tmp_path: Path) -> None:
    found = kimi_k3(tmp_path)
    assert (found.config.hidden_size, found.config.intermediate_size) == (K, N)
    assert found.config.activation is MoEActivation.SITU
    assert found.config.activation_params == ActivationParams(beta=4.0, limit=25.0)
    assert found.config.routing == RoutingConfig("sigmoid", has_correction_bias=True)
    assert found.router_weight is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_situ_beta": "x"}, "activation_situ_beta is 'x'"),
        ({"activation_situ_beta": 0.0}, "beta=0"),
        ({"moe_latent_size": 2 * K}, f"moe_latent_size is {2 * K}"),
    ],
)
def test_kimi_k3s_entries(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        kimi_k3(tmp_path, **changes)


def test_situ_needs_its_beta(tmp_path: Path) -> None:
    del (config := {**KIMI_K3})["activation_situ_beta"]
    with pytest.raises(CheckpointError, match="activation_situ_beta"):
        model(tmp_path, {"model_type": "kimi_linear", **config}, bias())


@pytest.mark.parametrize(
    ("entries", "params"),
    [
        ({}, None),
        ({"swiglu_limit": 7.0, "swiglu_alpha": 1.702}, None),
        ({"swiglu_limit": 5}, ActivationParams(limit=5.0)),
        ({"swiglu_limit": None}, ActivationParams(limit=math.inf)),
        ({"swiglu_alpha": 1.5, "swiglu_limit": 3}, ActivationParams(alpha=1.5, limit=3.0)),
    ],
)
def test_activation_parameters(tmp_path: Path, entries: dict[str, Any], params: ActivationParams | None) -> None:
    folder = write(tmp_path, {**expert_tensors(), **expert_biases()}, {"model_type": "gpt_oss", **OLD})
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt_oss", **OLD, **entries}))
    assert read_model(find_layer(Checkpoint.open(folder))).config.activation_params == params


@pytest.mark.parametrize("name", ["gate", "router", "router.layer", "gate.wg"])
def test_router(tmp_path: Path, name: str) -> None:
    gate = torch.randn(E, K).bfloat16()
    found = model(tmp_path, {"model_type": "mixtral", **OLD}, {f"model.layers.0.mlp.{name}.weight": gate})
    assert found.router_weight is not None
    assert torch.equal(found.router_weight, gate)
    assert found.router_bias is None


def test_biases_of_experts(tmp_path: Path) -> None:
    assert model(tmp_path / "a", {"model_type": "gpt_oss", **OLD}).config.has_bias
    message = "'gpt_oss' .*mlp.experts"
    with pytest.raises(CheckpointError, match=message):
        read_model(find_layer(Checkpoint.open(write(tmp_path, expert_tensors(), {"model_type": "gpt_oss", **OLD}))))


def test_router_bias(tmp_path: Path) -> None:
    gate = {"model.layers.0.mlp.router.weight": torch.zeros(E, K)}
    for number, name in enumerate(("router.bias", "gate.bias")):
        found = model(tmp_path / str(number), {"model_type": "gpt_oss", **OLD}, {**gate, **bias(name)})
        assert found.router_bias is not None
        assert found.router_bias.tolist() == list(range(E))
        assert found.correction_bias is None
    # without the router's weight, the caller brings logits
    assert model(tmp_path / "none", {"model_type": "gpt_oss", **OLD}).router_weight is None
    message = "mlp.router.bias"
    refused(tmp_path / "half", message, {"model_type": "gpt_oss", **OLD}, {**gate, **expert_biases()})


@pytest.mark.parametrize("name", ["router.bias", "gate.bias", "gate.e_score_correction_bias"])
def test_tensors_that_the_family_has_not(tmp_path: Path, name: str) -> None:
    config = {"model_type": "qwen3_moe", **NEW}
    refused(tmp_path / "a", f"{name} is unknown: routers of model_type 'qwen3_moe' have no such", config, bias(name))
    routing = "softmax,renormalize" + (",has_correction_bias" if "correction" in name else "")
    found = model(tmp_path / "b", config, bias(name), settings=ModelSettings(routing))
    used = found.correction_bias if "correction" in name else found.router_bias
    assert used is not None
    assert used.tolist() == list(range(E))


def test_more_tensors_of_the_router(tmp_path: Path) -> None:
    gate = {"model.layers.0.mlp.gate.weight": torch.zeros(E, K), "model.layers.0.mlp.gate.scale": torch.ones(K)}
    found = model(tmp_path / "a", {"model_type": "qwen3_moe", **NEW}, gate)
    assert found.config.routing is None
    assert "model.layers.0.mlp.gate.scale takes part in routing" in str(found.routing_reason)
    # what belongs to a quantized weight is the format's
    gate = {**gate, "model.layers.0.mlp.gate.weight": torch.zeros(E, K, dtype=torch.float8_e4m3fn)}
    assert model(tmp_path / "b", {"model_type": "qwen3_moe", **NEW}, gate).config.routing is not None


def test_quantized_router_is_left_out(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("key", ["num_experts", "num_experts_per_tok", "hidden_size"])
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
        ({**V3, "routed_scaling_factor": 0}, "routed_scaling_factor is 0, expected a number greater than 0"),
        ({**V3, "routed_scaling_factor": -0.5}, "routed_scaling_factor is -0.5, expected a number greater than 0"),
        ({**V3, "route_scale": 0.0}, "route_scale is 0, expected a number greater than 0"),
        ({"model_type": "gpt_oss", "swiglu_limit": -1}, "limit must be positive"),
        ({"scoring_func": "argmax"}, "scoring_func is 'argmax', but the code of model_type 'qwen3_moe'"),
        ({"model_type": "deepseek_v3", "n_group": 3, "topk_group": 1}, "do not divide into num_expert_group 3"),
        ({"model_type": "deepseek_v3", "n_group": 2}, "topk_group must be within 1..num_expert_group 2, got 4"),
        ({"model_type": "deepseek_v3", "n_group": 2, "topk_group": 3}, "topk_group must be within"),
        ({"model_type": "deepseek_v3", "n_group": 4, "topk_group": 1}, "top_k 2 is larger than the 1 experts"),
    ],
)
def test_contradictions(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    refused(tmp_path, message, {**CONFIG, **changes}, bias() if changes.get("model_type") == "deepseek_v3" else None)


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
