"""``loading()``: what it leaves as it was, where models come from, and what is refused before anything big is read."""

from __future__ import annotations

import json
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import moe_core as mc
import moe_transformers
import pytest
import torch
from moe_core.api.models import ChosenLayer
from moe_core.checkpoint.files import reading_threads
from moe_core.layer import loading
from moe_core_checkpoints import count_reads
from moe_transformers import MoeCoreExperts, RefusedError
from moe_transformers.dense import dense_tensors
from moe_transformers_checkpoints import (
    FORMATS,
    LINEAR,
    Format,
    checkpoint,
    logits,
    tiny_causal_model,
    tokens,
    write,
)
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen3MoeForCausalLM, modeling_utils
from transformers.utils.quantization_config import FineGrainedFP8Config

HOOKED = [
    (modeling_utils, "get_hf_quantizer"),
    (modeling_utils, "_get_dtype"),
    (modeling_utils, "_get_resolved_checkpoint_files"),
    (PreTrainedModel, "_load_pretrained_model"),
]


def functions() -> list[object]:
    return [vars(owner)[name] for owner, name in HOOKED]


def load(folder: Path | str, **arguments: Any) -> PreTrainedModel:
    with moe_transformers.loading():
        return AutoModelForCausalLM.from_pretrained(folder, **{"dtype": torch.bfloat16, **arguments})


def experts_of(model: nn.Module) -> list[MoeCoreExperts]:
    return [module for module in model.modules() if isinstance(module, MoeCoreExperts)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint in FP8, and one with the same values."""
    return checkpoint(tmp_path_factory.mktemp("fp8"), "qwen3_moe", "fp8 block")


@pytest.fixture(scope="module")
def folder(folders: tuple[Path, Path]) -> Path:
    return folders[0]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    return count_reads(monkeypatch)


# ------------------------------------------------------------------ what it changes


def test_transformers_is_as_before() -> None:
    before = functions()
    with moe_transformers.loading():
        assert not set(map(id, functions())) & set(map(id, before))
        with moe_transformers.loading(backend="torch"):
            pass
        assert not set(map(id, functions())) & set(map(id, before))
    assert functions() == before


@pytest.mark.parametrize("fewest", [0, reading_threads.FEWEST_BYTES], ids=["ahead", "in turn"])
def test_an_interrupted_load_leaves_transformers_usable(
    folder: Path, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, fewest: int
) -> None:
    before = functions()
    with monkeypatch.context() as patch:
        # while the second layer's experts are read
        calls: list[int] = []
        read = loading.read

        def interrupted(chosen: ChosenLayer) -> mc.MoEWeights:
            calls.append(1)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return read(chosen)

        patch.setattr(loading, "read", interrupted)
        patch.setattr(reading_threads, "FEWEST_BYTES", fewest)
        with pytest.raises(KeyboardInterrupt):
            load(folder)
    assert functions() == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("moe_core")]
    assert not experts_of(AutoModelForCausalLM.from_pretrained(folders[1]))
    model = load(folder)
    assert len(experts_of(model)) == 2
    # the block routes, so the layers keep no routers
    assert not [m for m in experts_of(model) if m.layer is None or m.layer.router_weight is not None]


def test_others_replacements_made_meanwhile_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    original = modeling_utils.get_hf_quantizer
    monkeypatch.setattr(modeling_utils, "get_hf_quantizer", original)
    with moe_transformers.loading():
        ours = modeling_utils.get_hf_quantizer

        def theirs(*arguments: Any, **named: Any) -> Any:
            return ours(*arguments, **named)

        modeling_utils.get_hf_quantizer = theirs
    assert modeling_utils.get_hf_quantizer is theirs


def test_other_threads_load_as_ever(folders: tuple[Path, Path]) -> None:
    before = functions()
    inside, done = threading.Event(), threading.Event()
    found: list[PreTrainedModel] = []

    def other() -> None:
        inside.wait()
        # transformers' own quantizer dequantizes these where there is no GPU
        found.append(AutoModelForCausalLM.from_pretrained(folders[0]))
        done.set()

    def mine() -> None:
        with moe_transformers.loading():
            inside.set()
            found.append(AutoModelForCausalLM.from_pretrained(folders[0]))
            done.wait()

    threads = [threading.Thread(target=run) for run in (other, mine)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(len(experts_of(model)) for model in found) == [0, 2]
    assert functions() == before


def test_models_in_16_bits_stay_as_they_are(folders: tuple[Path, Path]) -> None:
    expected = AutoModelForCausalLM.from_pretrained(folders[1])
    model = load(folders[1], dtype="auto")
    assert not experts_of(model)
    assert not hasattr(model, "hf_quantizer")
    assert not getattr(model, "is_quantized", False)
    assert torch.equal(logits(model, tokens()), logits(expected, tokens()))
    model.save_pretrained(folders[1].parent / "again")


def test_dense_models_stay_as_they_are(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 64}
    dense = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_key_value_heads=2)).eval()
    dense.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path, dtype="auto"), tokens()), logits(dense, tokens()))


# ------------------------------------------------------------------ where models come from


def as_on_the_hub(folder: Path, cache: Path) -> str:
    """A copy of ``folder`` in the cache of downloads; returns its name on the Hub."""
    repository = cache / "models--someone--model"
    shutil.copytree(folder, repository / "snapshots" / "0123abcd")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abcd")
    return "someone/model"


def test_names_of_the_hub(folder: Path, tmp_path: Path) -> None:
    name = as_on_the_hub(folder, tmp_path)
    model = load(name, cache_dir=tmp_path, local_files_only=True)
    assert torch.equal(logits(model, tokens()), logits(load(folder), tokens()))


def test_settings_beside_config_json_are_fetched(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = as_on_the_hub(folder, tmp_path)
    snapshot = tmp_path / "models--someone--model" / "snapshots" / "0123abcd"
    config = json.loads((snapshot / "config.json").read_text())
    settings = config.pop("quantization_config")
    (snapshot / "config.json").write_text(json.dumps(config))
    asked: list[tuple[str, str, Any]] = []

    def cached_file(repository: str, file: str, **named: Any) -> None:
        asked.append((repository, file, named["local_files_only"]))
        if file == "quant_config.json":
            (snapshot / file).write_text(json.dumps(settings))

    monkeypatch.setattr("moe_transformers.settings.cached_file", cached_file)
    model = load(name, cache_dir=tmp_path, local_files_only=True)
    assert (name, "hf_quant_config.json", True) in asked
    assert len(experts_of(model)) == 2


def test_shards(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    shutil.copy(folder / "config.json", tmp_path)
    names = sorted(tensors)
    weight_map = {}
    for shard in range(2):
        file = f"model-{shard + 1:05d}-of-00002.safetensors"
        mine = {name: tensors[name] for name in names[shard::2]}
        save_file(mine, tmp_path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(mine, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(logits(load(tmp_path), tokens()), logits(load(folder), tokens()))


# ------------------------------------------------------------------ reading and memory


@pytest.mark.parametrize("form", ["fp8 block", "gptq", "compressed-tensors w4a16"])
def test_each_experts_bytes_are_read_once(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = checkpoint(tmp_path, "qwen3_moe", form)
    reads = count_reads(monkeypatch)
    load(folder)
    names = mc.Checkpoint.open(folder).names
    experts = [name for name in names if ".experts." in name]
    assert experts
    assert {name: reads[name] for name in experts} == dict.fromkeys(experts, 1)
    # routers, and the two numbers of a shape, are read with what describes a layer, before it and with it
    twice = (".experts.", ".mlp.gate.", ".weight_shape")
    others = [name for name in names if not any(part in name for part in twice)]
    assert {name: reads[name] for name in others} == dict.fromkeys(others, 1)


def test_one_layer_more_than_the_model_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts the bytes of tensors that live at a time: layers in their backend's layout, one more beside them."""
    # the profiler sees the thread that it is in
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    quantized, _ = checkpoint(tmp_path, "mixtral", "compressed-tensors fp8", num_hidden_layers=4)
    one = mc.load_layer(quantized, layer=0, device="cpu", routing="per_call").weights.nbytes
    with Peak() as peak:
        model = load(quantized)
    layers = [module.layer.weights.nbytes for module in experts_of(model) if module.layer is not None]
    dense = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    assert layers == [one] * 4
    assert dense + sum(layers) <= peak.bytes <= dense + sum(layers) + one + ALLOWANCE


#: tensors of one number and the like, beside what a layer or a matrix takes
ALLOWANCE = 32 << 10


class Peak:
    """The most bytes of torch's CPU memory that exist at a time within it, beyond those before."""

    bytes = 0

    def __enter__(self) -> Peak:
        # acc_events: on a machine with a GPU, torch warns that events are cleared otherwise
        self.profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
        )
        self.profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.profile.__exit__(*error)
        held = 0
        for event in self.profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                held += event.nbytes()
                self.bytes = max(self.bytes, held)


# ------------------------------------------------------------------ refusals


def edited(folder: Path, to: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    """A copy with another config.json."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    edit(config)
    (to / "config.json").write_text(json.dumps(config))
    return to


def big(reads: Counter[str]) -> list[str]:
    """What was read of weights, beside routers."""
    return [name for name in reads if ".mlp.gate." not in name]


def test_a_quantizer_that_is_not_known(folder: Path, tmp_path: Path, reads: Counter[str]) -> None:
    entry = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    other = edited(folder, tmp_path / "bnb", lambda config: config.update(quantization_config=entry))
    with pytest.raises(RefusedError, match=r"'bitsandbytes' .*fp8.*moe_transformers\.loading\(\)"):
        load(other)
    assert not reads


def test_experts_that_no_backend_takes(folder: Path, tmp_path: Path, reads: Counter[str]) -> None:
    def narrow(config: dict[str, Any]) -> None:
        config["quantization_config"]["weight_block_size"] = [48, 80]

    other = edited(folder, tmp_path / "narrow", narrow)
    with pytest.raises(RefusedError, match="sm89"):
        load(other)
    assert not big(reads)


def test_experts_that_are_missing(folder: Path, tmp_path: Path, reads: Counter[str]) -> None:
    shutil.copytree(folder, tmp_path / "short")
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "layers.1.mlp.experts.5." not in name}
    save_file(kept, tmp_path / "short" / "model.safetensors")
    with pytest.raises(RefusedError, match="expert 5 "):
        load(tmp_path / "short")
    assert not big(reads)


def test_a_backend_that_is_not_there(folder: Path, reads: Counter[str]) -> None:
    with pytest.raises(RefusedError, match="marlin"), moe_transformers.loading(backend="marlin"):
        AutoModelForCausalLM.from_pretrained(folder)
    assert not big(reads)


def test_a_scheme_that_is_not_known() -> None:
    with pytest.raises(mc.MoEError, match="fp9"), moe_transformers.loading(quantize="fp9"):
        pass


def test_a_config_of_another_size(folder: Path, reads: Counter[str]) -> None:
    config = tiny_causal_model("qwen3_moe", moe_intermediate_size=32).config
    config.quantization_config = json.loads((folder / "config.json").read_text())["quantization_config"]
    with pytest.raises(RefusedError, match=r"model\.layers\.0\.mlp\.experts"):
        load(folder, config=config)
    assert not big(reads)


def test_a_config_of_another_activation(folder: Path, reads: Counter[str]) -> None:
    config = tiny_causal_model("qwen3_moe", hidden_act="gelu").config
    config.quantization_config = json.loads((folder / "config.json").read_text())["quantization_config"]
    with pytest.raises(RefusedError, match=r"layers\.0\.mlp\.experts"):
        load(folder, config=config)
    assert not big(reads)


def test_arguments_that_do_not_go_with_it(folder: Path) -> None:
    with pytest.raises(mc.ConfigError, match="quantization_config"):
        load(folder, quantization_config=FineGrainedFP8Config(dequantize=True))
    config = AutoConfig.from_pretrained(folder)
    config.distributed_config = {"tp_size": 2, "ep_size": 2}
    with pytest.raises(mc.ConfigError, match="ep_size"):
        load(folder, config=config)
    config = AutoConfig.from_pretrained(folder)
    with moe_transformers.loading(), pytest.raises(mc.ConfigError, match="checkpoint"):
        Qwen3MoeForCausalLM.from_pretrained(None, config=config, state_dict={})


class Normed(nn.Module):
    """Experts with a norm, as transformers marks its classes."""

    is_transposed, has_gate, has_post_expert_norm = False, True, True

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.ones(2, 4, 4))


def test_experts_that_compute_something_else_are_refused_by_name() -> None:
    from moe_transformers.blocks import blocks

    config = mc.FusedMoEConfig(num_experts=2, top_k=1, hidden_size=4, intermediate_size=2)
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"experts": Normed()})])})
    (block,) = blocks(model)
    assert (block.name, block.index) == ("layers.0.experts", 0)
    with pytest.raises(mc.ConfigError, match=r"layers\.0\.experts .*Normed"):
        block.check(config)
    soft = model["layers"][0]["experts"]
    soft.has_post_expert_norm = False
    soft.gate_softcap = nn.Identity()
    soft.up_softcap = 30.0
    expected = "gate_softcap, up_softcap"
    with pytest.raises(mc.ConfigError, match=expected):
        block.check(config)


# ------------------------------------------------------------------ mixed formats


def test_formats_differ_per_layer(tmp_path: Path) -> None:
    """INT4 experts in one layer, FP8 in the next; compressed-tensors says so by groups of modules."""
    int4, fp8 = FORMATS["compressed-tensors w4a16"], FORMATS["compressed-tensors fp8"]

    def of(name: str) -> Format | None:
        if not LINEAR.search(name):
            return None
        return int4 if ".layers.0." in name else fp8

    quantized, plain = write(tmp_path, tiny_causal_model("qwen3_moe"), of)
    config = json.loads((quantized / "config.json").read_text())
    groups = {}
    for number, form in enumerate((int4, fp8)):
        group = {**form.config["config_groups"]["group_0"], "targets": [rf"re:.*layers\.{number}\..*"]}
        groups[f"group_{number}"] = group
    config["quantization_config"] = {**int4.config, "format": "mixed-precision", "config_groups": groups}
    (quantized / "config.json").write_text(json.dumps(config))
    with moe_transformers.loading(activation_key=None):
        model = AutoModelForCausalLM.from_pretrained(quantized, dtype=torch.float32)
    schemes = [module.layer.selection.weight_key for module in experts_of(model) if module.layer is not None]
    assert [key.dtype.name for key in schemes if key is not None] == ["uint4b8", "e4m3"]
    expected = logits(AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32), tokens())
    assert (logits(model, tokens()) - expected).norm() < 2e-4 * expected.norm()


def test_layers_in_16_bits_stay_transformers(tmp_path: Path) -> None:
    fp8 = FORMATS["fp8 block"]
    quantized, plain = write(
        tmp_path, tiny_causal_model("qwen3_moe"), lambda name: fp8 if "layers.1.mlp.experts" in name else None
    )
    with moe_transformers.loading(activation_key=None):
        model = AutoModelForCausalLM.from_pretrained(quantized, dtype=torch.float32)
    assert [name for name, module in model.named_modules() if isinstance(module, MoeCoreExperts)] == [
        "model.layers.1.mlp.experts"
    ]
    expected = logits(AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32), tokens())
    assert (logits(model, tokens()) - expected).norm() < 2e-4 * expected.norm()


def test_layers_that_the_model_lacks_are_not_looked_at(
    folder: Path, reads: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[str] = []

    def spied(*arguments: Any) -> Any:
        found = dense_tensors(*arguments)
        given.extend(found)
        return found

    monkeypatch.setattr("moe_transformers.quantizer.dense_tensors", spied)
    config = AutoConfig.from_pretrained(folder)
    config.num_hidden_layers = 1
    model = load(folder, config=config)
    assert len(experts_of(model)) == 1
    assert given
    # hundreds of experts would be taken for linear layers
    assert not [name for name in given if ".experts." in name]
    assert not [name for name in reads if "layers.1." in name and ".mlp.gate." not in name]


def test_experts_are_not_quantized_twice(folder: Path, reads: Counter[str]) -> None:
    with moe_transformers.loading(quantize="fp8_per_channel"):
        with pytest.raises(RefusedError, match="fp8_per_channel"):
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert not [name for name in reads if ".experts." in name]


def test_16_bit_experts_are_quantized_where_that_is_asked_for(folders: tuple[Path, Path]) -> None:
    with moe_transformers.loading(quantize="fp8_per_channel_w8a16"):
        model = AutoModelForCausalLM.from_pretrained(folders[1], dtype=torch.float32)
    assert len(experts_of(model)) == 2
    expected = logits(AutoModelForCausalLM.from_pretrained(folders[1], dtype=torch.float32), tokens())
    error = (logits(model, tokens()) - expected).norm() / expected.norm()
    # e4m3 has 4 significant bits: each weight is off by at most 2^-4 of itself, in three matrices of two layers
    assert 1e-4 < error < 6 * 2.0**-4
