from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from moe_core import CheckpointError
from moe_core.checkpoint import Checkpoint, LayerExperts, find_layer
from moe_core.checkpoint.files.tensor_names import parse_name
from moe_core.checkpoint.model import read_model
from moe_core_checkpoints import E, K, N, expert_tensors, layer_tensors, write
from safetensors.torch import save_file

NAMINGS = {
    "model.layers.0.mlp": ("gate_proj", "up_proj", "down_proj"),
    "model.layers.0.block_sparse_moe": ("w1", "w3", "w2"),
    "backbone.layers.0.mixer": ("up_proj", "down_proj"),
    "language_model.model.layers.0.feed_forward": ("gate_proj", "up_proj", "down_proj"),
    "layers.0.ffn": ("w1", "w3", "w2"),
}


def found(folder: Path, tensors: dict[str, torch.Tensor], index: int | None = None) -> LayerExperts:
    return find_layer(Checkpoint.open(write(folder, tensors)), index)


@pytest.mark.parametrize("block", NAMINGS)
def test_every_naming(tmp_path: Path, block: str) -> None:
    names = NAMINGS[block]
    tensors = expert_tensors(block, names)
    layer = found(tmp_path, {**tensors, f"{block}.shared_experts.up_proj.weight": torch.zeros(2, 2)})
    assert (layer.prefix, layer.block, layer.index) == (f"{block}.experts", block, 0)
    assert layer.num_experts == E
    assert layer.is_gated is (len(names) == 3)
    assert not layer.has_bias
    ours = ("gate", "up", "down")[-len(names) :]
    assert layer.projections == set(ours)
    for projection, name in zip(ours, names, strict=True):
        assert layer.suffixes(projection) == ("weight",)
        assert layer.shape(projection, "weight") == ((K, N) if projection == "down" else (N, K))
        for expert in range(E):
            key = f"{block}.experts.{expert}.{name}.weight"
            assert layer.name(expert, projection, "weight") == key
            assert torch.equal(layer.tensor(expert, projection, "weight"), tensors[key])
        stacked = layer.stacked(projection, "weight", [2, 0])
        assert torch.equal(stacked[0], tensors[f"{block}.experts.2.{name}.weight"])
        assert torch.equal(stacked[1], tensors[f"{block}.experts.0.{name}.weight"])


STACKED = {
    "model.layers.3.mlp.experts.gate_up_proj": ("gate_up", "weight"),
    "model.layers.3.mlp.experts.gate_up_proj_scale_inv": ("gate_up", "scale_inv"),
    "model.layers.3.mlp.experts.gate_up_proj.weight_scale_inv": ("gate_up", "weight_scale_inv"),
    "model.layers.3.mlp.experts.gate_up_proj_bias": ("gate_up", "bias"),
    "model.layers.3.mlp.experts.down_proj_blocks": ("down", "blocks"),
    "model.layers.3.mlp.experts.down_proj_scales": ("down", "scales"),
    "model.layers.3.mlp.experts.up_proj.weight": ("up", "weight"),
    "model.layers.3.block_sparse_moe.input_linear.weight": ("gate_up", "weight"),
    "model.layers.3.block_sparse_moe.output_linear.weight": ("down", "weight"),
}


@pytest.mark.parametrize("name", STACKED)
def test_stacked_names(name: str) -> None:
    parsed = parse_name(name)
    assert parsed is not None
    assert (parsed.projection, parsed.suffix) == STACKED[name]
    assert (parsed.layer, parsed.expert) == (3, None)
    assert parsed.block == "model.layers.3." + name.split(".")[3]


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.shared_experts.gate_proj.weight",
        "model.layers.0.mlp.shared_expert.up_proj.weight",
        "model.layers.0.shared_mlp.input_linear.weight",
        "mtp.layers.0.mlp.experts.0.gate_proj.weight",
        "model.mtp_block.layers.0.mlp.experts.0.gate_proj.weight",
        "mlp.experts.0.gate_proj.weight",
        "model.layers.0.mlp.experts.gate_projx.weight.experts",
        "model.layers.0.mlp.experts.12345678.gate_proj.weight",
        "model.layers.0.mlp.experts.\u0663.gate_proj.weight",
        "",
    ],
)
def test_names_of_other_tensors(name: str) -> None:
    assert parse_name(name) is None


def test_stacked_experts(tmp_path: Path) -> None:
    prefix = "model.layers.0.mlp.experts"
    tensors = {
        f"{prefix}.gate_up_proj": torch.randn(E, 2 * N, K),
        f"{prefix}.gate_up_proj_bias": torch.randn(E, 2 * N),
        f"{prefix}.down_proj": torch.randn(E, K, N),
        f"{prefix}.down_proj_input_scale": torch.tensor([3.0]),
    }
    layer = found(tmp_path, tensors)
    assert (layer.num_experts, layer.stacked_names, layer.is_gated, layer.has_bias) == (E, True, True, True)
    assert layer.shape("gate_up", "weight") == (2 * N, K)
    assert layer.suffixes("gate_up") == ("bias", "weight")
    for expert in range(E):
        assert torch.equal(layer.tensor(expert, "gate_up", "weight"), tensors[f"{prefix}.gate_up_proj"][expert])
        assert torch.equal(layer.tensor(expert, "gate_up", "bias"), tensors[f"{prefix}.gate_up_proj_bias"][expert])
    # one value for all experts
    assert layer.shape("down", "input_scale") == (1,)
    assert layer.tensor(2, "down", "input_scale").tolist() == [3.0]
    assert torch.equal(layer.stacked("down", "weight", [1]), tensors[f"{prefix}.down_proj"][1:2])


def test_layers_without_moe_are_skipped(tmp_path: Path) -> None:
    tensors = {
        "model.layers.0.mlp.gate_proj.weight": torch.zeros(2, 2),
        **layer_tensors(1),
        **layer_tensors(2),
        **layer_tensors(4),
    }
    checkpoint = Checkpoint.open(write(tmp_path, tensors))
    assert checkpoint.moe_layers == (1, 2, 4)
    assert Checkpoint.open(write(tmp_path / "dense", {"a": torch.zeros(1)})).moe_layers == ()
    assert find_layer(checkpoint).index == 1
    assert find_layer(checkpoint, 4).index == 4
    for index in (0, 3, -1):
        with pytest.raises(CheckpointError, match=f"layer {index} "):
            find_layer(checkpoint, index)


def test_model_without_moe(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'qwen3_moe'"):
        found(tmp_path, {"model.layers.0.mlp.gate_proj.weight": torch.zeros(2, 2)})


def test_names_of_openai(tmp_path: Path) -> None:
    tensors = {"block.0.mlp.mlp1_weight.blocks": torch.zeros(4, 64, 1, 16, dtype=torch.uint8)}
    with pytest.raises(CheckpointError, match=r"mlp1_weight.blocks .*gpt-oss"):
        find_layer(Checkpoint.open(write(tmp_path, tensors)))


def test_experts_that_are_pickled(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="pytorch_model.bin"):
        found(tmp_path, {"model.layers.0.mlp.gate_proj.weight": torch.zeros(2, 2)})


def broken(folder: Path, tensors: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        found(folder, tensors)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    for number, name in enumerate(expert_tensors()):
        tensors = expert_tensors()
        del tensors[name]
        broken(tmp_path / str(number), tensors, f"{name} is missing")


def test_missing_expert_is_named(tmp_path: Path) -> None:
    tensors = {name: t for name, t in expert_tensors().items() if ".experts.1." not in name}
    broken(tmp_path / "a", tensors, "expert 1 is missing")
    far = expert_tensors(experts=1)
    far |= {name.replace("experts.0", "experts.999999"): tensor.clone() for name, tensor in far.items()}
    broken(tmp_path / "b", far, "expert 1 is missing")


@pytest.mark.parametrize("projection", ["gate_proj", "up_proj", "down_proj"])
def test_expert_of_another_shape_or_dtype(tmp_path: Path, projection: str) -> None:
    name = f"model.layers.0.mlp.experts.2.{projection}.weight"
    like = f"model.layers.0.mlp.experts.0.{projection}.weight"
    tensors = expert_tensors()
    shape = list(tensors[name].shape)
    tensors[name] = tensors[name][:-1].contiguous()
    expected = f"{name} is BF16 [{shape[0] - 1}, {shape[1]}], expected BF16 {shape} as {like}"
    broken(tmp_path / "shape", tensors, expected)
    tensors = expert_tensors()
    tensors[name] = tensors[name].float()
    broken(tmp_path / "dtype", tensors, f"{name} is F32 {shape}, expected BF16 {shape} as {like}")


def test_projections_that_are_no_mlp(tmp_path: Path) -> None:
    broken(tmp_path / "a", expert_tensors(names=("gate_proj", "down_proj")), "has the projections down, gate; expected")
    broken(tmp_path / "b", expert_tensors(names=("up_proj",)), "has the projections up; expected")


def test_same_projection_under_two_names(tmp_path: Path) -> None:
    tensors = {**expert_tensors(), **expert_tensors(names=("w1", "w3", "w2"))}
    broken(tmp_path, tensors, "are the same projection of the same expert")


def test_stacked_and_single_experts_mixed(tmp_path: Path) -> None:
    tensors = {**expert_tensors(), "model.layers.0.mlp.experts.down_proj_bias": torch.zeros(E, K)}
    broken(tmp_path, tensors, "mixes stacked experts (model.layers.0.mlp.experts.down_proj_bias)")


def test_stacked_tensors_of_different_expert_counts(tmp_path: Path) -> None:
    prefix = "model.layers.0.mlp.experts"
    tensors = {f"{prefix}.gate_up_proj": torch.zeros(E, 2 * N, K), f"{prefix}.down_proj": torch.zeros(E - 1, K, N)}
    broken(tmp_path / "a", tensors, f"{prefix}.down_proj is F32 [{E - 1}, {K}, {N}], expected [E, ...]")
    flat = {f"{prefix}.gate_up_proj": torch.zeros(4), f"{prefix}.down_proj": torch.zeros(4)}
    broken(tmp_path / "b", flat, "expected weights [E, rows, columns]")
    empty = {f"{prefix}.gate_up_proj": torch.zeros(0, 2, 2), f"{prefix}.down_proj": torch.zeros(0, 2, 2)}
    broken(tmp_path / "c", empty, "F32 [0, 2, 2]")


def test_two_stacks_of_experts_in_one_layer(tmp_path: Path) -> None:
    tensors = {**expert_tensors("m.a.layers.0.mlp"), **expert_tensors("m.b.layers.0.mlp")}
    broken(
        tmp_path, tensors, "layer 0 has experts under 'm.a.layers.0.mlp.experts' and under 'm.b.layers.0.mlp.experts'"
    )


def test_stacks_of_layers_are_named(tmp_path: Path) -> None:
    blocks = ("talker.model.layers.0.mlp", "thinker.model.layers.0.mlp")
    tensors = {**expert_tensors(blocks[0], seed=1), **expert_tensors(blocks[1], seed=2)}
    broken(tmp_path / "a", tensors, "stack (--stack), one of talker or thinker")
    checkpoint = Checkpoint.open(write(tmp_path / "b", tensors))
    for block in blocks:
        layer = find_layer(checkpoint, stack=block.partition(".")[0])
        assert layer.block == block
        assert torch.equal(layer.tensor(1, "up", "weight"), tensors[f"{block}.experts.1.up_proj.weight"])
    with pytest.raises(CheckpointError, match="'model'.*talker, thinker"):
        find_layer(checkpoint, stack="model")
    # the family's own stack needs no name
    omni = Checkpoint.open(write(tmp_path / "c", tensors, model_type="qwen3_omni_moe"))
    assert find_layer(omni).block == blocks[1]


def test_tensors_of_experts_that_are_no_projection(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.post_expert_norm.weight"
    broken(tmp_path, {**expert_tensors(), name: torch.ones(K)}, f"{name} in {tmp_path} is unknown")


def test_asking_for_what_is_not_there(tmp_path: Path) -> None:
    layer = found(tmp_path, layer_tensors())
    for call in (layer.shape, layer.dtype, layer.stored_dtype):
        with pytest.raises(CheckpointError, match="'weight_scale'"):
            call("up", "weight_scale")
    with pytest.raises(CheckpointError, match="'weight' .*'gate_up'"):
        layer.tensor(0, "gate_up", "weight")
    assert repr(layer) == "LayerExperts('model.layers.0.mlp.experts', 4 experts)"


LEFT_OUT: dict[str, Callable[[str], bool]] = {
    "all experts": lambda name: ".experts." in name,
    "one layer": lambda name: name.startswith("model.layers.1."),
    "one expert": lambda name: name.startswith(f"{LAST_LAYER}.experts.1."),
    "the last expert": lambda name: name.startswith(f"{LAST_LAYER}.experts.{E - 1}."),
    "one projection": lambda name: name.startswith(f"{LAST_LAYER}.experts.") and ".down_proj." in name,
    "one tensor": lambda name: name == f"{LAST_LAYER}.experts.2.up_proj.weight",
}
LAST_LAYER = "model.layers.1.mlp"


@pytest.mark.parametrize("indexed", [True, False], ids=["index", "single file"])
@pytest.mark.parametrize("what", LEFT_OUT)
def test_a_file_that_is_not_read_is_named(tmp_path: Path, what: str, indexed: bool) -> None:
    left_out = LEFT_OUT[what]
    tensors = {**layer_tensors(0), **layer_tensors(1)}
    there = {name: tensor for name, tensor in tensors.items() if not left_out(name)}
    folder = write(tmp_path, there, shards=2 if indexed else 0)
    save_file({name: tensor for name, tensor in tensors.items() if left_out(name)}, folder / "model-other.safetensors")
    (folder / "model-broken.safetensors").write_bytes(b"?")
    why = "index.json leaves this file out" if indexed else "model.safetensors alone is read"
    with pytest.raises(CheckpointError, match=rf"model-other\.safetensors .*{why}"):
        read_model(find_layer(Checkpoint.open(folder), 1))
    (folder / "model-other.safetensors").unlink()
    with pytest.raises(CheckpointError) as caught:
        read_model(find_layer(Checkpoint.open(folder), 1))
    assert "safetensors holds" not in str(caught.value)
