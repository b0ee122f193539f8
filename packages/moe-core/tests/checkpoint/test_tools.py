from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import CheckpointError
from moe_core.checkpoint import Checkpoint, LayerExperts, find_layer
from moe_core.checkpoint.tools.auto_round import auto_round_settings
from moe_core.checkpoint.tools.compressed_tensors import quant_group
from moe_core.checkpoint.tools.gptq import gptq_settings
from moe_core.checkpoint.tools.modelopt import is_modelopt, quant_algo
from moe_core.checkpoint.tools.quark import quark_layer
from moe_core_checkpoints import expert_tensors, write

PREFIX = "model.layers.0.mlp.experts"


@pytest.fixture
def layer(tmp_path: Path) -> LayerExperts:
    return find_layer(Checkpoint.open(write(tmp_path, expert_tensors())))


def mixed(**layers: Any) -> dict[str, Any]:
    return {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


@pytest.mark.parametrize(
    ("method", "expected"), [("modelopt", True), ("modelopt_mixed", True), ("fp8", False), (None, False), (3, False)]
)
def test_method(method: object, expected: bool) -> None:
    assert is_modelopt({"quant_method": method}) is expected


def test_algorithm_in_capitals(layer: LayerExperts) -> None:
    assert quant_algo({"quant_algo": "w4a8_mxfp4_fp8"}, layer)[0] == "W4A8_MXFP4_FP8"


@pytest.mark.parametrize(
    "layers",
    [
        {PREFIX: {"quant_algo": "fp8", "group_size": 64}},
        {"model.layers.0.mlp": {"quant_algo": "FP8", "group_size": 64}, "model": {"quant_algo": "NVFP4"}},
        {"*.experts.*": {"quant_algo": "FP8", "group_size": 64}},
        {
            f"{PREFIX}.{expert}.{p}_proj": {"quant_algo": "FP8", "group_size": 64}
            for expert in range(4)
            for p in ("gate", "up", "down")
        },
    ],
)
def test_mixed_precision(layer: LayerExperts, layers: dict[str, Any]) -> None:
    algorithm, entries = quant_algo(mixed(**layers), layer)
    assert (algorithm, entries.integer("group_size")) == ("FP8", 64)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({}, "quant_algo"),
        ({"quant_algo": ["FP8"]}, "['FP8']"),
        ({"quant_algo": "mixed_precision"}, "quantized_layers"),
        (mixed(lm_head={"quant_algo": "FP8"}), f"{PREFIX}.0.down_proj"),
        (mixed(**{PREFIX: 3}), f"{PREFIX} is 3"),
        (mixed(**{PREFIX: {}}), f"quantized_layers.{PREFIX}: quant_algo"),
        (
            mixed(**{PREFIX: {"quant_algo": "FP8"}, f"{PREFIX}.0.up_proj": {"quant_algo": "NVFP4"}}),
            f"{PREFIX}",
        ),
    ],
)
def test_what_is_refused(layer: LayerExperts, quantization: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        quant_algo(quantization, layer)


# ------------------------------------------------------------------ Quark


def test_quark_by_name_class_and_globally(layer: LayerExperts) -> None:
    quantization: dict[str, Any] = {
        "layer_quant_config": {"*attn*": {"weight": {"dtype": "a"}}, "*mlp.experts*": {"weight": {"dtype": "b"}}},
        "layer_type_quant_config": {"<class 'torch.nn.modules.linear.Linear'>": {"weight": {"dtype": "c"}}},
        "global_quant_config": {"weight": {"dtype": "d"}},
    }
    for part, dtype in (("layer_quant_config", "b"), ("layer_type_quant_config", "c"), ("global_quant_config", "d")):
        found = quark_layer(dict(quantization), layer)
        assert not isinstance(found, str)
        assert found.weight.dtype == dtype
        del quantization[part]
    with pytest.raises(CheckpointError, match="global_quant_config"):
        quark_layer(dict(quantization), layer)


def test_quark_exact_names_before_patterns(layer: LayerExperts) -> None:
    names = [f"{PREFIX}.{expert}.{p}_proj" for expert in range(4) for p in ("gate", "up", "down")]
    by_name = {"*experts*": {"weight": {"dtype": "a"}}} | {name: {"weight": {"dtype": "b"}} for name in names}
    found = quark_layer({"layer_quant_config": by_name}, layer)
    assert not isinstance(found, str)
    assert found.weight.dtype == "b"


@pytest.mark.parametrize("order", [1, -1])
def test_quark_classes_of_experts_before_linear(layer: LayerExperts, order: int) -> None:
    classes = {"<class 'torch.nn.modules.linear.Linear'>": "a", "<class 'x.Qwen3MoeExperts'>": "b"}
    by_type = {name: {"weight": {"dtype": dtype}} for name, dtype in list(classes.items())[::order]}
    found = quark_layer({"layer_type_quant_config": by_type}, layer)
    assert not isinstance(found, str)
    assert found.weight.dtype == "b"


@pytest.mark.parametrize(
    ("entries", "reason"),
    [({"weight": None}, "weight is null"), ({"weight": {}, "output_tensors": {}}, "output_tensors are quantized")],
)
def test_quark_experts_that_nothing_reads(layer: LayerExperts, entries: dict[str, Any], reason: str) -> None:
    found = quark_layer({"global_quant_config": entries}, layer)
    assert isinstance(found, str)
    assert f"global_quant_config: {reason}" in found


def test_quark_projections_that_differ(layer: LayerExperts) -> None:
    quantization = {
        "layer_quant_config": {"*down_proj": {"weight": {"dtype": "fp8_e4m3"}}},
        "global_quant_config": {"weight": {"dtype": "fp4"}},
    }
    with pytest.raises(CheckpointError, match=f"{PREFIX}"):
        quark_layer(quantization, layer)


def test_quantized_layers_that_contradict_the_algorithm(layer: LayerExperts) -> None:
    layers = {"lm_head": {"quant_algo": "NVFP4"}, f"{PREFIX}.1.up_proj": {"quant_algo": "fp8"}}
    assert quant_algo({"quant_algo": "FP8", "quantized_layers": layers}, layer)[0] == "FP8"
    with pytest.raises(CheckpointError, match=r"quant_algo .*MXFP8.*'fp8'"):
        quant_algo({"quant_algo": "MXFP8", "quantized_layers": layers}, layer)


# ------------------------------------------------------------------ every tool

WEIGHTS = {"type": "int", "num_bits": 8}


@pytest.mark.parametrize(
    ("parse", "quantization"),
    [
        (quant_group, {"config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}}}),
        (quant_algo, {"quant_algo": "FP8"}),
        (quark_layer, {"global_quant_config": {"weight": {"dtype": "fp4"}}}),
        (gptq_settings, {"bits": 4}),
        (auto_round_settings, {"bits": 4}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_config_is_understood_once(layer: LayerExperts, parse: Callable[..., Any], quantization: Any) -> None:
    """Formats of several schemes ask for it; another config, or another layer's, is another."""
    found = parse(quantization, layer)
    assert parse(quantization, layer) is found
    changed = copy.deepcopy(quantization)
    assert parse(changed, layer) is not found
    assert parse(quantization, find_layer(layer.checkpoint)) is not found


#: beginnings of module names: in the file, and in the tool's config
NAMINGS = [
    ("model", "language_model.model"),
    ("language_model.model", "model.language_model"),
    ("model.language_model", "model"),
    ("backbone", "model"),
]


def named(module: str, bits: int) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """A config of each tool that has settings with ``bits`` for the module, and others for the rest of the model."""
    own, rest = {"bits": bits}, {"bits": 2}
    groups = {
        "rest": {"targets": ["Linear"], "weights": {"num_bits": 2}},
        "own": {"targets": [module], "weights": {"num_bits": bits}},
    }
    pattern = f"^{re.escape(module)}$"
    return {
        "compressed-tensors": (quant_group, {"config_groups": groups}),
        "quark": (
            quark_layer,
            {
                "layer_quant_config": {module: {"weight": {"group_size": bits}}},
                "global_quant_config": {"weight": {"group_size": 2}},
            },
        ),
        "modelopt": (quant_algo, mixed(**{module: {"quant_algo": "FP8", "group_size": bits}})),
        "gptq": (gptq_settings, {**rest, "dynamic": {f"+:{pattern}": own}}),
        "auto-round": (auto_round_settings, {**rest, "extra_config": {module: own}}),
        "auto-round, pattern": (auto_round_settings, {**rest, "extra_config": {pattern: own}}),
    }


def bits_of(found: Any) -> int:
    if isinstance(found, tuple):
        return int(found[1].entries["group_size"])
    if hasattr(found, "weights"):
        return int(found.weights.num_bits)
    return int(found.weight.group_size if hasattr(found, "weight") else found.bits)


def linear_layer(folder: Path, module: str) -> LayerExperts:
    """A linear layer as formats see it: one expert of one projection."""
    checkpoint = Checkpoint.open(write(folder, {f"{module}.weight": torch.ones(2, 2)}))
    info = checkpoint.info(f"{module}.weight")
    key = ("down", "weight")
    return LayerExperts(checkpoint, module, module, 0, 1, False, {key: (info.name,)}, {key: info})


@pytest.mark.parametrize(("stored", "stated"), NAMINGS)
@pytest.mark.parametrize("tool", named("", 8))
def test_settings_in_another_naming(tmp_path: Path, tool: str, stored: str, stated: str) -> None:
    """Of linear layers, and of experts one by one."""
    end = "layers.3.self_attn.q_proj"
    parse, quantization = named(f"{stated}.{end}", 8)[tool]
    assert bits_of(parse(quantization, linear_layer(tmp_path / "a", f"{stored}.{end}"))) == 8
    tensors = expert_tensors(f"{stored}.layers.0.mlp", ("up_proj", "down_proj"), experts=1)
    layer = find_layer(Checkpoint.open(write(tmp_path / "b", tensors)))
    prefix = f"{stated}.layers.0.mlp.experts.0"
    parts = [named(f"{prefix}.{projection}_proj", 8)[tool][1] for projection in ("up", "down")]
    assert bits_of(parse(merged(*parts), layer)) == 8


@pytest.mark.parametrize("tool", sorted(named("", 8).keys() - {"modelopt"}))
def test_layers_of_other_parts_of_a_model_are_others(tmp_path: Path, tool: str) -> None:
    """A vision tower has layers with numbers too."""
    parse, quantization = named("model.layers.3.self_attn.q_proj", 8)[tool]
    layer = linear_layer(tmp_path, "vision_tower.encoder.layers.3.self_attn.q_proj")
    assert bits_of(parse(quantization, layer)) == 2


def merged(one: Any, other: Any) -> Any:
    """Both objects: their entries, and those of their objects; lists one behind the other."""
    if isinstance(one, list):
        return [*one, *(item for item in other if item not in one)]
    if not isinstance(one, dict):
        return one
    return {
        key: merged(one[key], other[key]) if key in one and key in other else (one | other)[key] for key in one | other
    }
