"""Loaded models: generation, compilation, devices, and what they refuse."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import moe_core as mc
import moe_transformers
import pytest
import torch
from moe_transformers import MoeCoreExperts
from moe_transformers.plan import Plan
from moe_transformers.quantizer import MoeCoreQuantizer
from moe_transformers_checkpoints import checkpoint, logits, tokens
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("gptq"), "qwen3_moe", "gptq")[0]


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    with moe_transformers.loading():
        return AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16", device_map="cpu")


def generated(model: PreTrainedModel, prompts: Tensor, **arguments: Any) -> Tensor:
    mask = torch.ones_like(prompts)
    found = model.generate(
        prompts, attention_mask=mask, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0, **arguments
    )
    assert isinstance(found, Tensor)
    return found[:, prompts.shape[1] :]


def greedy(model: PreTrainedModel, prompts: Tensor, count: int) -> Tensor:
    """What generation without a cache gives, token by token."""
    whole = prompts
    for _ in range(count):
        whole = torch.cat((whole, logits(model, whole)[:, -1:].argmax(dim=-1)), dim=1)
    return whole[:, prompts.shape[1] :]


def test_generates_what_the_logits_say(folder: Path) -> None:
    # in float32: where two tokens are nearly as likely, roundings of 16 bits choose between them
    with moe_transformers.loading():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    prompts = tokens(3, 5)
    expected = greedy(model, prompts, 6)
    assert len({tuple(row) for row in expected.tolist()}) > 1
    assert torch.equal(generated(model, prompts), expected)
    assert torch.equal(generated(model, prompts, cache_implementation="static"), expected)
    for row in range(3):
        assert torch.equal(generated(model, prompts[row : row + 1]), expected[row : row + 1])


def test_many_sequences_at_once(model: PreTrainedModel) -> None:
    prompts = tokens(1, 7).expand(33, -1)
    found = logits(model, prompts)
    # batched matrix products of 16 bits sum in another order
    assert (found - found[:1]).norm() < 0.02 * found.norm()


def test_compiles_as_one_graph(model: PreTrainedModel) -> None:
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        found = compiled(tokens(), use_cache=False).logits
    assert torch.equal(found.double(), logits(model, tokens()))


def test_hidden_states_in_16_bits(model: PreTrainedModel, folder: Path) -> None:
    with moe_transformers.loading():
        exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = logits(exact, tokens())
    error = (logits(model, tokens()) - expected).norm() / expected.norm()
    # each of some thirty tensors on the way is rounded to 8 bits, by at most 2^-9 of itself
    assert 1e-4 < error < 30 * 2.0**-9


def test_gradients_are_refused(model: PreTrainedModel) -> None:
    with pytest.raises(mc.TensorError, match=r"hidden_states .*torch\.no_grad\(\)"):
        model(tokens())
    assert not model.hf_quantizer.is_trainable


def test_saving_is_refused(model: PreTrainedModel, folder: Path, tmp_path: Path) -> None:
    # the model inside, and one that was unpickled, are refused too
    for one in (model, model.model, copy.deepcopy(model)):
        with pytest.raises(mc.ConfigError, match=str(folder)):
            one.save_pretrained(tmp_path / "saved")
    assert not list(tmp_path.iterdir())
    with pytest.warns(mc.ExpertsLeftOutWarning) as told:
        model.state_dict()
    assert len(told) == 1
    with mc.experts_left_out(model):
        assert not [name for name in model.state_dict() if "experts" in name]


def test_the_config_keeps_the_checkpoints_entry(model: PreTrainedModel) -> None:
    entry = model.config.to_dict()["quantization_config"]
    assert (entry["quant_method"], entry["bits"]) == ("gptq", 4)


def test_copies_compute_the_same(model: PreTrainedModel) -> None:
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin, tokens()), logits(model, tokens()))
    assert twin.hf_quantizer._plan is None, "files stay open"


@pytest.mark.parametrize("change", [{"device": "meta"}, {"dtype": torch.float16}, {"dtype": torch.float32}])
def test_moving_and_converting_are_refused_whole(model: PreTrainedModel, change: dict[str, Any]) -> None:
    before = [(parameter.dtype, parameter.device) for parameter in model.parameters()]
    with pytest.raises(mc.ConfigError, match="load"):
        model.to(**change)
    assert [(parameter.dtype, parameter.device) for parameter in model.parameters()] == before


@pytest.mark.parametrize("chosen", [1, 3, 4])
def test_blocks_may_choose_other_numbers_of_experts(model: PreTrainedModel, folder: Path, chosen: int) -> None:
    """More or fewer than config.json says: when the model is loaded, or later."""
    with moe_transformers.loading():
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16", num_experts_per_tok=chosen)
    changed = copy.deepcopy(model)
    for block in changed.model.layers:
        block.mlp.gate.top_k = chosen
    expected, found = logits(loaded, tokens()).float(), logits(changed, tokens()).float()
    # several calls of a layer round to 16 bits once more than one
    assert float((found - expected).abs().max()) <= 2**-6 * float(expected.abs().max())
    assert not torch.equal(found, logits(model, tokens()).float())


# ------------------------------------------------------------------ devices


class FoundError(Exception):
    """Ends loading where the device map is known."""


@pytest.fixture
def maps(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Device maps with which loading would begin."""
    found: list[dict[str, Any]] = []

    def tensors(self: MoeCoreQuantizer, model: Any, device_map: dict[str, Any]) -> None:
        found.append(device_map)
        raise FoundError

    monkeypatch.setattr(MoeCoreQuantizer, "tensors", tensors)
    monkeypatch.setattr(
        "transformers.integrations.accelerate.get_max_memory", lambda max_memory=None: dict(max_memory or {})
    )
    return found


def test_experts_count_where_a_model_is_divided(tmp_path: Path, maps: list[dict[str, Any]]) -> None:
    folder, _ = checkpoint(tmp_path, "qwen3_moe", "compressed-tensors fp8", num_hidden_layers=4)
    one = mc.load_layer(folder, layer=0, device="cpu", routing="per_call").weights.nbytes
    with moe_transformers.loading(), pytest.raises(FoundError):
        AutoModelForCausalLM.from_pretrained(
            folder, dtype="bfloat16", device_map="sequential", max_memory={0: int(2.9 * one), 1: 9 * one}
        )
    (found,) = maps
    # what is beside experts takes less than half of a layer's
    first = {name for name, device in found.items() if device == 0 and ".layers." in name}
    assert 1 <= len(first) <= 2
    assert {device for name, device in found.items() if ".layers." in name} == {0, 1}


def test_experts_apart_from_the_gpu_are_refused(folder: Path) -> None:
    model = AutoModelForCausalLM.from_config(
        AutoModelForCausalLM.from_pretrained(folder.parent / "plain", dtype="bfloat16").config
    )
    plan = Plan.of(model, folder, moe_transformers.options.Options(), torch.bfloat16)
    names = [layer.block.name for layer in plan.layers]
    assert names == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    with pytest.raises(mc.ConfigError, match=r"model\.layers\.1\.mlp\.experts .*max_memory"):
        plan.place({"model.layers.0": "cuda:0", "model.layers.1": "cpu", "": "cuda:0"})
    # nor where there are no others that run
    for everything in ("disk", torch.device("meta")):
        with pytest.raises(mc.ConfigError, match=r"model\.layers\.0\.mlp\.experts .*disk"):
            plan.place({"": everything})


def test_the_largest_layers_conversion_has_room(folder: Path) -> None:
    quantizer = MoeCoreQuantizer(moe_transformers.options.Options(), {})
    quantizer._beside = 10
    assert quantizer.adjust_max_memory({0: 100, 1: 5, "cpu": 100}) == {0: 90, 1: 0, "cpu": 100}


def test_experts_follow_a_device_map_of_modules(folder: Path) -> None:
    parts = {"model.embed_tokens": "cpu", "model.layers": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    with moe_transformers.loading():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16", device_map={**parts, "lm_head": "cpu"})
    assert sum(isinstance(module, MoeCoreExperts) for module in model.modules()) == 2
    assert torch.isfinite(logits(model, tokens())).all()
