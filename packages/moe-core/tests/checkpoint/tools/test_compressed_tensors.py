from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import CheckpointError
from moe_core.checkpoint import Checkpoint, LayerExperts, find_layer
from moe_core.checkpoint.tools.compressed_tensors import quant_group
from moe_core_checkpoints import expert_tensors, write

PREFIX = "model.layers.0.mlp.experts"


@pytest.fixture
def layer(tmp_path: Path) -> LayerExperts:
    return find_layer(Checkpoint.open(write(tmp_path, expert_tensors())))


def group(*targets: object, **weights: Any) -> dict[str, Any]:
    return {"targets": list(targets), "weights": {"type": "int", "num_bits": 8, **weights}}


def groups(*found: dict[str, Any], **top: Any) -> dict[str, Any]:
    return {"config_groups": {f"group_{i}": one for i, one in enumerate(found)}, **top}


def test_arguments(layer: LayerExperts) -> None:
    weights = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": 128,
        "symmetric": False,
        "dynamic": False,
        "actorder": "weight",
        "block_structure": None,
        "scale_dtype": "torch.uint8",
    }
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    one = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": "int-quantized"}
    found = quant_group(groups(one, format="mixed-precision"), layer)
    assert (found.name, found.format) == ("group_0", "int-quantized")
    args = found.weights
    assert (args.type, args.num_bits, args.strategy, args.group_size) == ("int", 4, "group", 128)
    assert (args.symmetric, args.dynamic, args.actorder, args.scale_dtype) == (False, False, "weight", "torch.uint8")
    assert str(args) == "static int4 by group 128"
    assert found.inputs is not None
    assert (found.inputs.strategy, found.inputs.dynamic, found.inputs.symmetric) == ("token", True, True)
    assert quant_group(groups(group("Linear"), format="pack-quantized"), layer).format == "pack-quantized"


@pytest.mark.parametrize(
    ("entries", "strategy"), [({}, "tensor"), ({"group_size": -1}, "channel"), ({"group_size": 32}, "group")]
)
def test_strategies_that_are_implied(layer: LayerExperts, entries: dict[str, Any], strategy: str) -> None:
    assert quant_group(groups(group("Linear", **entries)), layer).weights.strategy == strategy


def test_names_win_over_patterns_over_classes(layer: LayerExperts) -> None:
    names = [f"{PREFIX}.0.{p}_proj" for p in ("gate", "up", "down")]
    found = groups(group("Linear"), group("re:.*experts.*"), group(*names), group("re:.*attn"))
    assert quant_group(dict(found), layer).name == "group_2"
    del found["config_groups"]["group_2"]
    assert quant_group(dict(found), layer).name == "group_1"
    del found["config_groups"]["group_1"]
    assert quant_group(dict(found), layer).name == "group_0"


@pytest.mark.parametrize(
    "target",
    ["RoutedExperts", "FusedMoE", "Qwen3MoeExperts", "GptOssExperts", "Llama4TextExperts", "GraniteMoeSharedExperts"],
)
@pytest.mark.parametrize("order", [1, -1])
def test_classes_of_experts_before_linear(layer: LayerExperts, target: str, order: int) -> None:
    both = {"experts": group(target, num_bits=4), "linear": group("Linear"), "all": group("Module", num_bits=2)}
    found = {"config_groups": dict(list(both.items())[::order])}
    assert quant_group(found, layer).name == "experts"
    # one projection alone is how formats see a linear layer
    linear = replace(layer, _infos={key: info for key, info in layer._infos.items() if key[0] == "down"})
    assert quant_group(dict(found), linear).name == "linear"
    assert quant_group({"config_groups": {"all": both["all"]}}, layer).name == "all"


def test_classes_of_experts_in_groups_that_differ(layer: LayerExperts) -> None:
    assert quant_group(groups(group("FusedMoE"), group("RoutedExperts")), layer).name == "group_0"
    with pytest.raises(CheckpointError, match="num_bits .*8 and 4"):
        quant_group(groups(group("FusedMoE"), group("RoutedExperts", num_bits=4)), layer)


def test_shared_experts_are_not_routed(layer: LayerExperts) -> None:
    assert quant_group(groups(group("InklingSharedExperts"), group("Linear")), layer).name == "group_1"


def test_targets_of_several_groups(layer: LayerExperts) -> None:
    """As the tool resolves them: patterns in alphabetical order, and the last group of equal targets."""
    first, second = group("re:.*proj"), group("re:.*mlp.*")
    assert quant_group(groups(first, second), layer).name == "group_1"
    assert quant_group(groups(second, first), layer).name == "group_0"
    assert quant_group(groups(group("Linear"), group("Linear")), layer).name == "group_1"


@pytest.mark.parametrize(
    "target",
    ["re:.*mlp\\.experts$", PREFIX, "re:.*block_sparse_moe.*w[123]$", "language_model.model.layers.0.mlp.experts"],
)
def test_another_naming_before_classes(layer: LayerExperts, target: str) -> None:
    assert quant_group(groups(group("Linear"), group(target)), layer).name == "group_1"


@pytest.mark.parametrize("names", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")])
@pytest.mark.parametrize("target", ["re:.*gate.*", "re:.*experts.*[.]up_proj$"])
def test_a_pattern_of_gate_or_up_names_no_other(tmp_path: Path, names: tuple[str, str, str], target: str) -> None:
    """The library tries names of modules alone; the fused name would match for gate and for up."""
    layer = find_layer(Checkpoint.open(write(tmp_path, expert_tensors(names=names))))
    with pytest.raises(CheckpointError, match="num_bits"):
        quant_group(groups(group("Linear", num_bits=4), group(target)), layer)
    other = "up" if "gate" in target else "gate"
    first = next(name for name in names[:2] if (name in ("up_proj", "w3")) is (other == "up"))
    with pytest.raises(CheckpointError, match=rf"no target .*[.]{first}"):
        quant_group(groups(group(target, "re:.*down_proj")), layer)


def test_the_fused_name_stands_for_both(layer: LayerExperts) -> None:
    found = groups(group("Linear", num_bits=4), group("re:.*gate_up_proj$", "re:.*down_proj"))
    assert quant_group(found, layer).weights.num_bits == 8


def test_dense_blocks_are_not_another_naming(tmp_path: Path) -> None:
    """Kimi Linear has ``mlp`` in its first layer and ``block_sparse_moe`` in others."""
    tensors = {**expert_tensors("model.layers.1.block_sparse_moe"), "model.layers.0.mlp.up_proj.weight": torch.ones(1)}
    layer = find_layer(Checkpoint.open(write(tmp_path, tensors)))
    assert quant_group(groups(group("re:.*mlp.*"), group("Linear")), layer).name == "group_1"


def test_an_exact_name_in_another_naming_before_a_pattern(layer: LayerExperts) -> None:
    names = [f"model.layers.0.block_sparse_moe.experts.{e}.w{w}" for e in range(4) for w in (1, 2, 3)]
    assert quant_group(groups(group("re:.*experts.*"), group(*names)), layer).name == "group_1"


def test_patterns_match_from_the_start(layer: LayerExperts) -> None:
    """As re.match does: "mlp" alone is no module of ours."""
    assert quant_group(groups(group("re:mlp"), group("Linear")), layer).name == "group_1"


def test_groups_that_say_the_same(layer: LayerExperts) -> None:
    """Projections of different groups are fine where those agree."""
    assert quant_group(groups(group("re:.*gate"), group("re:.*(up|down)")), layer).weights.num_bits == 8


@pytest.mark.parametrize(
    "target",
    [
        "re:.*block_sparse_moe.experts.*w[123]$",
        "re:^language_model.model.layers.0.feed_forward.experts.*",
        "re:.*ffn.experts$",
        "re:backbone.*up_proj|backbone.*w[12]",
    ],
)
def test_targets_in_another_naming(layer: LayerExperts, target: str) -> None:
    """Tools write module paths of another naming than their file's."""
    assert quant_group(groups(group(target)), layer).name == "group_0"
    kv = {"targets": ["re:.*attn"], "weights": None}
    assert quant_group(groups(kv, group("re:.*attn"), group(target)), layer).name == "group_2"


def test_a_group_alone_must_name_the_experts(layer: LayerExperts) -> None:
    for target in ("re:.*attn.*", "re:.*layers.1.*", "re:.*w1$", "lm_head"):
        with pytest.raises(CheckpointError, match=f"config_groups .*{PREFIX}.0"):
            quant_group(groups(group(target)), layer)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({}, "config_groups"),
        ({"config_groups": [1]}, "config_groups is [1]"),
        (groups({"targets": ["Linear"], "weights": None}), "config_groups"),
        (groups(group("a"), group("b")), f"{PREFIX}.0.down_proj"),
        (groups(group("re:("), group("b")), "group_0"),
        (groups(group("re:" + "a" * 2000), group("b")), "expression"),
        (groups(group("Linear", num_bits=[8])), "num_bits is [8]"),
        (groups(group("Linear", strategy=3)), "strategy is 3"),
        (groups(group("Linear", symmetric="no")), "'no'"),
        (groups(group("Linear", dynamic=2)), "dynamic is 2"),
        (groups(group("Linear", block_structure="128")), "block_structure is '128'"),
        (groups({"targets": ["Linear"], "weights": [8]}), "weights is [8]"),
    ],
)
def test_what_is_refused(layer: LayerExperts, quantization: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        quant_group(quantization, layer)


def test_targets_that_are_no_text(layer: LayerExperts) -> None:
    assert quant_group(groups(group(3, None), group("Linear")), layer).name == "group_1"
    assert quant_group(groups({**group(), "targets": 5}, group("Linear")), layer).name == "group_1"


TOKEN = {"type": "int", "num_bits": 8, "strategy": "token", "dynamic": True}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_activations": {**TOKEN, "symmetric": False}}, "input_activations"),
        (
            {"input_activations": {**TOKEN, "scale_dtype": "torch.uint8"}},
            "scale_dtype",
        ),
        ({"input_activations": None}, "input_activations"),
        ({"weights": {"num_bits": 8, "actorder": "group"}}, "actorder"),
        ({"weights": {"num_bits": 8, "symmetric": False}}, "symmetric"),
        ({"format": "pack-quantized"}, "'int-quantized'"),
    ],
)
@pytest.mark.parametrize("target", ["re:.*up_proj", "re:.*experts.2.*"])
def test_groups_that_differ_in_anything(
    layer: LayerExperts, target: str, changes: dict[str, Any], message: str
) -> None:
    """Of other projections, and of other experts."""
    one = {**group("Linear"), "input_activations": TOKEN, "format": "int-quantized"}
    alike = quant_group(groups(one, {**one, "targets": [target]}), layer)
    assert alike.format == "int-quantized"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        quant_group(groups(one, {**one, "targets": [target], **changes}), layer)


def test_defaults_of_what_is_left_out(layer: LayerExperts) -> None:
    found = quant_group(groups({"targets": ["Linear"], "weights": {"group_size": None}}), layer).weights
    assert (found.type, found.num_bits, found.strategy, found.symmetric, found.dynamic) == (
        *("int", 8, "tensor", True),
        False,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(
            ({name: None}, f"weights: {name} is None, expected a value, or no such entry for the tool's default")
            for name in ("type", "num_bits", "symmetric", "dynamic")
        ),
        ({"type": ""}, "type is ''"),
        ({"type": "bfloat"}, "'bfloat'"),
        ({"strategy": "channel", "group_size": 32}, "group_size is 32"),
        (
            {"strategy": "channel", "block_structure": [1, 32]},
            "block_structure is [1, 32]",
        ),
        ({"strategy": "block"}, "block_structure"),
        ({"actorder": "first"}, "actorder"),
    ],
)
@pytest.mark.parametrize("part", ["weights", "input_activations"])
def test_arguments_that_the_tool_refuses(layer: LayerExperts, part: str, changes: dict[str, Any], message: str) -> None:
    one = {**group("Linear"), "input_activations": TOKEN}
    broken = {**one, part: {**TOKEN, **changes}}
    quant_group(groups(one), layer)
    with pytest.raises(CheckpointError, match=re.escape(message.replace("weights:", f"{part}:"))):
        quant_group(groups(broken), layer)


def test_actorder_true_means_group(layer: LayerExperts) -> None:
    assert quant_group(groups(group("Linear", actorder=True)), layer).weights.actorder == "group"
    assert quant_group(groups(group("Linear", actorder=False)), layer).weights.actorder is None


def test_outputs_that_are_quantized(layer: LayerExperts) -> None:
    with pytest.raises(CheckpointError, match="output_activations"):
        quant_group(groups({**group("Linear"), "output_activations": TOKEN}), layer)


def test_formats_that_contradict_each_other(layer: LayerExperts) -> None:
    one = {**group("Linear"), "format": "int-quantized"}
    for top in ("int-quantized", "mixed-precision", None):
        assert quant_group(groups(one, format=top), layer).format == "int-quantized"
    with pytest.raises(CheckpointError, match=r"group_0.format .*'pack-q"):
        quant_group(groups(one, format="pack-quantized"), layer)


@pytest.mark.parametrize("location", ["input", "output", "weight_input", "q_attn"])
@pytest.mark.parametrize("target", ["Linear", "re:.*down_proj$", "re:.*self_attn.*"])
def test_transforms_at_run_time(layer: LayerExperts, location: str, target: str) -> None:
    """Rotations of the experts' inputs, which nothing here computes; those of weights are in the weights."""
    transform: dict[str, Any] = {
        "config_groups": {"R4": {"type": "hadamard", "apply": [{"location": location, "targets": [target]}]}}
    }
    quantization = groups(group("Linear"), transform_config=transform)
    if location in ("input", "output") and "attn" not in target:
        with pytest.raises(CheckpointError, match=rf"R4 .*{location}"):
            quant_group(quantization, layer)
    else:
        assert quant_group(quantization, layer).name == "group_0"
    transform["config_groups"]["R4"]["apply"][0]["ignore"] = ["re:.*experts.*"]
    assert quant_group(dict(quantization), layer).name == "group_0"
