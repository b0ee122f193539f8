"""Experts in 16 bits that a tool stored one by one: transformers' modules get them, or the model is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import moe_transformers
import pytest
import torch
from moe_core.api.models import parse_name
from moe_core.checkpoint.config.families import family_of
from moe_core_transformers import families, omni_model, tiny_model
from moe_transformers import MoeCoreExperts, RefusedError
from moe_transformers.blocks import blocks
from moe_transformers_checkpoints import FORMATS, logits, tiny_causal_model, tokens
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

KNOWN = sorted(name for name in families() if family_of(name) is not None)
#: transformers does not mark their experts' classes
UNMARKED = {"llama4_text", "longcat_flash", "step3p5"} & set(KNOWN)
NAMES = {"proj": ("gate_proj", "up_proj", "down_proj"), "w": ("w1", "w3", "w2")}
#: float32 products of three matrices in another order
ROUNDING = 1e-4


def one_by_one(name: str, module: nn.Module, names: tuple[str, str, str]) -> Iterator[tuple[str, Tensor]]:
    """The parameters of an experts ``module`` as linear layers, [outputs, inputs], of each expert."""
    gate, up, down = names
    first = "gate_up_proj" if module.has_gate else "up_proj"
    for suffix, end in (("weight", ""), ("bias", "_bias")):
        if not hasattr(module, first + end):
            continue
        w13, w2 = getattr(module, first + end).detach(), getattr(module, "down_proj" + end).detach()
        if module.is_transposed and suffix == "weight":
            w13, w2 = w13.mT, w2.mT
        for expert in range(w13.shape[0]):
            rows = w13[expert]
            parts = {up: rows, down: w2[expert]}
            if module.has_gate:
                gates, ups = rows.chunk(2) if module.is_concatenated else (rows[::2], rows[1::2])
                parts |= {gate: gates, up: ups}
            for projection, tensor in parts.items():
                yield f"{name}.{expert}.{projection}.{suffix}", tensor.clone().contiguous()


def unmerged(folder: Path, model: PreTrainedModel, scheme: str) -> Path:
    """``model`` as saved, its experts one by one under the names of its modules."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if parse_name(name) is None}
    for block in blocks(model):
        kept |= dict(one_by_one(block.name, block.module, NAMES[scheme]))
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def load(kind: type[Any], folder: Path, quantize: str | None = None, **arguments: Any) -> tuple[Any, dict[str, Any]]:
    with moe_transformers.loading(quantize=quantize, activation_key=None if quantize is None else "checkpoint"):
        return kind.from_pretrained(folder, **{"dtype": torch.float32, "output_loading_info": True, **arguments})


@pytest.mark.parametrize("scheme", NAMES)
@pytest.mark.parametrize("model_type", sorted(set(KNOWN) - UNMARKED))
def test_every_familys_modules_get_them(tmp_path: Path, model_type: str, scheme: str) -> None:
    model = tiny_model(model_type)
    loaded, info = load(type(model), unmerged(tmp_path, model, scheme))
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    expected, found = dict(model.named_parameters()), dict(loaded.named_parameters())
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


def test_two_stacks_of_layers(tmp_path: Path) -> None:
    model = omni_model()
    loaded, _ = load(type(model), unmerged(tmp_path, model, "proj"))
    expected, found = dict(model.named_parameters()), dict(loaded.named_parameters())
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


def test_stacked_experts_in_another_layout(tmp_path: Path) -> None:
    """gpt-oss's as linear layers have them, outputs first."""
    model = tiny_model("gpt_oss")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    turned = {n: t.mT.contiguous() if ".experts." in n and t.dim() == 3 else t for n, t in tensors.items()}
    save_file(turned, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded, _ = load(type(model), tmp_path)
    expected, found = dict(model.named_parameters()), dict(loaded.named_parameters())
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


def test_a_model_that_is_saved_again(tmp_path: Path) -> None:
    model = tiny_causal_model("gpt_oss")
    loaded, _ = load(AutoModelForCausalLM, unmerged(tmp_path / "split", model, "proj"))
    loaded.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)
    assert torch.equal(logits(again, tokens()), logits(model, tokens()))


# ------------------------------------------------------------------ next to quantized layers


def mixed(folder: Path, model_type: str, scheme: str = "proj") -> tuple[Path, PreTrainedModel]:
    """Experts one by one, in FP8 in the second layer alone, as llm-compressor writes; the model of its values."""
    model = tiny_causal_model(model_type)
    form = FORMATS["compressed-tensors fp8"]
    unmerged(folder, model, scheme)
    tensors = load_file(folder / "model.safetensors")
    own = {block.name: block for block in blocks(model) if block.index == 1}
    assert len(own) == 1
    for name in list(tensors):
        if any(name.startswith(f"{block}.") for block in own) and name.endswith(".weight"):
            parts, exact = form.quantize(tensors.pop(name))
            tensors |= {f"{name.removesuffix('weight')}{suffix}": part for suffix, part in parts.items()}
            put(model, name, exact)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    group = {**form.config["config_groups"]["group_0"], "targets": [r"re:.*layers\.1\..*experts.*"]}
    config["quantization_config"] = {**form.config, "config_groups": {"group_0": group}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, model


def put(model: nn.Module, name: str, exact: Tensor) -> None:
    """Writes the values of one expert's projection into the module's parameters."""
    prefix, expert, projection, _ = name.rsplit(".", 3)
    module = model.get_submodule(prefix)
    down = projection in ("down_proj", "w2")
    parameter = module.down_proj if down else module.gate_up_proj
    matrix = parameter.data[int(expert)]
    matrix = matrix.mT if module.is_transposed else matrix
    if not down:
        number = 0 if projection in ("gate_proj", "w1") else 1
        rows = matrix.shape[0] // 2
        matrix = matrix[number * rows :][:rows] if module.is_concatenated else matrix[number::2]
    matrix.copy_(exact)


@pytest.mark.parametrize(
    ("model_type", "scheme"),
    [(name, "proj") for name in ("gpt_oss", "granitemoe", "lfm2_moe", "minimax_m2", "mixtral", "phimoe", "qwen3_moe")]
    + [(name, "w") for name in ("minimax_m2", "qwen3_moe")],
)
def test_layers_that_a_tool_left_out(tmp_path: Path, model_type: str, scheme: str) -> None:
    folder, model = mixed(tmp_path, model_type, scheme)
    loaded, info = load(AutoModelForCausalLM, folder)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ours = [name for name, module in loaded.named_modules() if isinstance(module, MoeCoreExperts)]
    assert len(ours) == 1
    assert "layers.1." in ours[0]
    expected = logits(model, tokens())
    assert (logits(loaded, tokens()) - expected).norm() < ROUNDING * expected.norm()


def test_layers_that_a_tool_left_out_are_quantized_where_that_is_asked_for(tmp_path: Path) -> None:
    folder, model = mixed(tmp_path, "gpt_oss")
    loaded, _ = load(AutoModelForCausalLM, folder, quantize="fp8_per_channel_w8a16")
    assert sum(isinstance(module, MoeCoreExperts) for module in loaded.modules()) == 2
    expected = logits(model, tokens())
    # e4m3 has 4 significant bits, in three matrices of one layer; the other's activations are quantized too
    assert (logits(loaded, tokens()) - expected).norm() < 6 * 2.0**-4 * expected.norm()


# ------------------------------------------------------------------ refusals


def test_biases_for_which_a_module_has_no_place(tmp_path: Path) -> None:
    folder = unmerged(tmp_path, tiny_model("qwen3_moe"), "proj")
    tensors = load_file(folder / "model.safetensors")
    biases = {f"{n[: -len('weight')]}bias": t[:, 0].clone() for n, t in tensors.items() if ".experts." in n}
    save_file(tensors | biases, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RefusedError, match=r"mlp\.experts .*bias"):
        load(type(tiny_model("qwen3_moe")), folder)


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    model = tiny_model("gpt_oss")
    with torch.no_grad():
        next(iter(blocks(model))).module.down_proj[3, 1, 2] = torch.nan
    with pytest.raises(RefusedError, match=r"experts\.3\.down_proj\.weight"):
        load(type(model), unmerged(tmp_path, model, "proj"))


def test_experts_of_another_size(tmp_path: Path) -> None:
    folder = unmerged(tmp_path, tiny_model("gpt_oss"), "proj")
    config = tiny_model("gpt_oss", intermediate_size=40).config
    for arguments in ({}, {"ignore_mismatched_sizes": True}):
        with pytest.raises(RefusedError, match="experts"):
            load(type(tiny_model("gpt_oss")), folder, config=config, **arguments)


def test_fewer_experts_than_the_model_has(tmp_path: Path) -> None:
    folder = unmerged(tmp_path, tiny_model("gpt_oss"), "proj")
    config = tiny_model("gpt_oss", num_local_experts=17).config
    with pytest.raises(RefusedError, match="experts"):
        load(type(tiny_model("gpt_oss")), folder, config=config)


@pytest.mark.parametrize("model_type", sorted(UNMARKED))
def test_families_whose_experts_stay_transformers(tmp_path: Path, model_type: str) -> None:
    """Never random values there either."""
    model = tiny_model(model_type)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: t for name, t in tensors.items() if parse_name(name) is None or "layers.1." not in name}
    assert kept.keys() != tensors.keys()
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RefusedError, match=r"layers\.1\..*experts"):
        load(type(model), tmp_path)


@pytest.mark.parametrize(
    ("model_type", "part"),
    [("qwen2_moe", "shared_expert."), ("deepseek_v3", "shared_experts."), ("granitemoeshared", "shared_mlp.")],
)
def test_shared_experts_that_are_missing(tmp_path: Path, model_type: str, part: str) -> None:
    model = tiny_model(model_type)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if part not in name}
    assert kept.keys() != tensors.keys()
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RefusedError, match=part):
        load(type(model), tmp_path)


def test_a_stack_that_the_checkpoint_lacks_beside_quantized_experts(tmp_path: Path) -> None:
    """Families whose experts moe-core does not run are refused wherever the first quantized layer is."""
    model = tiny_causal_model("llama4_text", num_experts_per_tok=1)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if ".layers.1." in name and "experts.gate_up_proj" in name]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = torch.ones(tensors[name].shape[0], 1, tensors[name].shape[-1])
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RefusedError, match="topk_ids"):
        load(AutoModelForCausalLM, tmp_path)


class Experts(nn.Module):
    """As transformers marks its classes."""

    is_transposed, has_gate = False, True


def test_layers_that_predict_ahead_are_not_those_of_the_model() -> None:
    """They count from 0 again: the tensors of the model's first layer are not theirs."""

    def layers() -> nn.ModuleDict:
        return nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"experts": Experts()})])})

    inner = layers()
    inner["mtp"] = layers()
    model = nn.ModuleDict({"model": inner, "mtp": layers()})
    assert [block.name for block in blocks(model)] == ["model.layers.0.experts"]
