"""The names of a checkpoint's experts, found in one pass."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path

import torch
from moe_core.checkpoint import Checkpoint, find_layer
from moe_core.checkpoint.files.tensor_names import ExpertNames, parse_name, predicts_ahead
from moe_core_checkpoints import expert_tensors, write

BEGINS = (
    "model.layers.3.mlp",
    "talker.model.layers.3.mlp",
    "model.layers.3.experts.1",
    "mtp.layers.0.mlp",
    "model.mtp_block.layers.0.mlp",
    "model.layers.3.block_sparse_moe",
    "model.layers.3.moe",
    "mlp",
    "",
    "model.layers\n.3.mlp",
)
MIDDLES = (".experts.", "..experts.", ".shared_experts.", ".")
ENDS = (
    "0.gate_proj.weight",
    "7.w2.weight_scale_inv",
    "0.experts.1.gate_proj.weight",
    "gate_up_proj",
    "gate_up_proj_scale",
    "down_proj.experts.weight",
    "0.gate_proj.mtp.weight",
    "mtp.gate_proj.weight",
    "e_score_correction_bias",
    "12345678.up_proj.weight",
    "input_linear.weight",
    "gate_proj.weight",
    "gate_proj.7.weight_scale",
    "gate_up.7.qweight",
    "down.7.qweight",
    "down.weight",
    "",
    "0.up_proj.weight\n",
)


def test_one_pass_finds_what_single_names_say() -> None:
    names = ["".join(parts) for parts in itertools.product(BEGINS, MIDDLES, ENDS)]
    found = ExpertNames(names)
    expected = {name: parse_name(name) for name in names}
    assert found.others == [name for name in names if ".experts." in name and expected[name] is None]
    seen = {
        name: (stack, layer.prefix, layer.block, layer.layer, expert, *key)
        for stack, layers in found.stacks.items()
        for layer in layers.values()
        for key, tensors in layer.tensors.items()
        for expert, name in tensors.items()
    }
    assert len(seen) > 20
    assert seen == {
        name: (p.prefix.partition(".")[0], p.prefix, p.block, p.layer, p.expert, p.projection, p.suffix)
        for name, p in expected.items()
        if p is not None
    }


def test_names_of_single_tools() -> None:
    by_projection = parse_name("model.layers.3.mlp.experts.gate_proj.7.weight_scale")
    assert by_projection is not None
    assert (by_projection.expert, by_projection.projection, by_projection.suffix) == (7, "gate", "weight_scale")
    for name, projection in (
        ("moe.down_proj.weight_scale_inv", "down"),
        ("block_sparse_moe.input_linear.weight", "gate_up"),
    ):
        bare = parse_name(f"model.layers.3.{name}")
        assert bare is not None
        assert (bare.expert, bare.projection, bare.block) == (
            None,
            projection,
            f"model.layers.3.{name.partition('.')[0]}",
        )
    for name, projection in (("gate_up.7.qweight", "gate_up"), ("down.7.g_idx", "down")):  # GPTQModel's gpt-oss
        numbered = parse_name(f"model.layers.3.mlp.experts.{name}")
        assert numbered is not None
        assert (numbered.expert, numbered.projection, numbered.suffix) == (7, projection, name.rpartition(".")[2])
    # the short names alone say nothing
    for name in ("experts.gate_up.qweight", "experts.down", "experts.7.down.qweight", "gate_proj.weight"):
        assert parse_name(f"model.layers.3.mlp.{name}") is None


def test_blocks_that_predict_further_tokens() -> None:
    for name in ("mtp.layers.0.mlp.experts", "model.mtp_layers.0.experts.down_proj", "nextn.0.mlp", "draft_model.norm"):
        assert predicts_ahead(name)
    for name in ("model.layers.0.mlp.experts", "model.layers.0.prompt.weight", "layers.0.mlp.mtp"):
        assert not predicts_ahead(name)


def test_one_tensor_under_two_names() -> None:
    names = [f"layers.0.experts.0.{name}.weight" for name in ("w1", "gate_proj", "w2")]
    (layer,) = ExpertNames(names).stacks["layers"].values()
    assert layer.twice == [(names[0], names[1])]
    assert sorted(layer) == [names[0], names[2]]


def test_tensors_have_no_objects_of_their_own(tmp_path: Path) -> None:
    """A model has 100,000: Python's garbage collector would look through all of theirs, again and again."""
    tensors = {
        name: tensor
        for layer in range(4)
        for name, tensor in expert_tensors(f"model.layers.{layer}.mlp", experts=64, hidden=2, inter=2).items()
    }
    folder = write(tmp_path / "c", {**tensors, "model.norm.weight": torch.ones(2)})
    find_layer(Checkpoint.open(folder), 0)
    gc.collect()
    before = len(gc.get_objects())
    checkpoint = Checkpoint.open(folder)
    layers = [find_layer(checkpoint, index) for index in checkpoint.moe_layers]
    gc.collect()
    assert len(layers) == 4
    assert len(gc.get_objects()) - before < len(tensors) / 4
