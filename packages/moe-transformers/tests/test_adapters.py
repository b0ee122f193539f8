"""PEFT and accelerate on models whose experts moe-core runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import moe_core as mc
import moe_transformers
import pytest
import torch
from moe_transformers import quantize_experts
from moe_transformers_checkpoints import checkpoint, logits, tokens
from moe_transformers_models import qwen3
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.peft import MIN_PEFT_VERSION, check_peft_version

# FutureWarning: PEFT's use of transformers
pytestmark = [
    pytest.mark.filterwarnings("ignore::moe_core.ExpertsLeftOutWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

ATTENTION = ["q_proj", "v_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("fp8"), "qwen3_moe", "compressed-tensors fp8")[0]


def loaded(folder: Path) -> PreTrainedModel:
    # 16-bit activations: a code that flips would hide what an adapter changes
    with moe_transformers.loading(activation_key=None):
        return AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()


def quantized(folder: Path) -> PreTrainedModel:
    model = qwen3().float().eval()
    quantize_experts(model, "fp8_per_channel_w8a16")
    return model


WAYS = (loaded, quantized)


def adapter(model: PreTrainedModel, folder: Path, **config: Any) -> Path:
    """An adapter with random weights, made by PEFT on a model of transformers alone."""
    peft = pytest.importorskip("peft", reason="the nox session `transformers` installs it")
    made = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=ATTENTION, **config))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in sorted(made.named_parameters()):
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 10)
    made.save_pretrained(folder)
    return folder


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """A model of the same sizes, its experts in 16 bits."""
    config = copy.deepcopy(model.config)
    config.__dict__.pop("quantization_config", None)
    config._experts_implementation = "eager"
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def same_state(model: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    now = model.state_dict()
    return list(now) == list(before) and all(torch.equal(now[name], tensor) for name, tensor in before.items())


def works_with_transformers() -> bool:
    """Whether this release of transformers takes the installed PEFT for its own methods (``load_adapter`` …)."""
    try:
        check_peft_version(min_version=MIN_PEFT_VERSION)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("make", WAYS)
def test_adapters_of_attention_are_loaded_merged_and_saved(
    make: Callable[[Path], PreTrainedModel], folder: Path, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft", reason="the nox session `transformers` installs it")
    model = make(folder)
    path = adapter(twin(model), tmp_path / "adapter")
    plain = logits(model, tokens())
    expected = logits(peft.PeftModel.from_pretrained(copy.deepcopy(model), path), tokens())
    assert not torch.equal(expected, plain)
    if works_with_transformers():
        by_transformers = copy.deepcopy(model)
        by_transformers.load_adapter(str(path))
        assert torch.equal(logits(by_transformers, tokens()), expected)
        by_transformers.save_pretrained(tmp_path / "again")
        path = tmp_path / "again"
    again = peft.PeftModel.from_pretrained(copy.deepcopy(model), path)
    assert torch.equal(logits(again, tokens()), expected)
    again.save_pretrained(tmp_path / "third")
    assert (tmp_path / "third" / "adapter_model.safetensors").is_file()
    merged = again.merge_and_unload()
    # W + BA instead of Wx + B(Ax): float32 sums in another order
    torch.testing.assert_close(logits(merged, tokens()), expected, rtol=1e-3, atol=1e-4)
    with pytest.raises(mc.ConfigError, match="saved"):
        merged.save_pretrained(tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("make", WAYS)
def test_adapters_of_experts_are_refused_before_any_is_applied(
    make: Callable[[Path], PreTrainedModel], folder: Path, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft", reason="the nox session `transformers` installs it")
    model = make(folder)
    path = adapter(twin(model), tmp_path / "adapter", target_parameters=EXPERTS)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(mc.ConfigError, match="target_parameters"):
        peft.PeftModel.from_pretrained(model, path)
    assert same_state(model, before)
    with pytest.raises(mc.ConfigError, match="target_parameters"):
        model.load_adapter(str(path))
    with pytest.raises(mc.ConfigError, match="target_parameters"):
        peft.get_peft_model(model, peft.LoraConfig(target_modules=ATTENTION, target_parameters=EXPERTS[:1]))
    with pytest.raises(mc.ConfigError, match="target_modules"):
        peft.get_peft_model(model, peft.LoraConfig(target_modules=[*ATTENTION, "experts.0.gate_proj"]))
    assert same_state(model, before)


@pytest.mark.parametrize("config", [{"target_parameters": EXPERTS}, {"modules_to_save": ["experts"]}])
def test_experts_that_peft_wraps_are_not_quantized(config: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft", reason="the nox session `transformers` installs it")
    model = peft.get_peft_model(qwen3().float(), peft.LoraConfig(r=4, target_modules=ATTENTION, **config)).eval()
    before = logits(model, tokens())
    with pytest.raises(mc.ConfigError, match="experts"):
        quantize_experts(model, "fp8_per_channel")
    assert torch.equal(logits(model, tokens()), before)
    attention = peft.get_peft_model(qwen3().float(), peft.LoraConfig(target_modules=ATTENTION))
    quantize_experts(attention, "fp8_per_channel")
    assert logits(attention, tokens()).isfinite().all()


@pytest.mark.parametrize("make", WAYS)
def test_accelerate_dispatches_and_does_not_offload(
    make: Callable[[Path], PreTrainedModel], folder: Path, tmp_path: Path
) -> None:
    accelerate = pytest.importorskip("accelerate", reason="the nox session `transformers` installs it")
    model = make(folder)
    expected = logits(model, tokens())
    for offload in (
        lambda: accelerate.cpu_offload(model, execution_device=torch.device("cpu")),
        lambda: accelerate.disk_offload(model, str(tmp_path), execution_device=torch.device("cpu")),
    ):
        with pytest.raises(mc.ConfigError, match="offload"):
            offload()
    assert torch.equal(logits(model, tokens()), expected)
    assert torch.equal(logits(accelerate.dispatch_model(model, {"": "cpu"}), tokens()), expected)
