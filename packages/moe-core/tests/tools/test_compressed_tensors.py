"""Groups of linear modules: those that compressed-tensors assigns, and those that are read from its config."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from moe_core import CheckpointError
from moe_core.checkpoint import Checkpoint, LayerExperts
from moe_core.checkpoint.tools.compressed_tensors import quant_group
from safetensors.torch import save_file
from torch import nn

pytest.importorskip("compressed_tensors", "0.20", reason="the nox session `tools` installs it")

LAYERS, EXPERTS, SIZE = 2, 3, 8
#: Patterns that match names of the model itself. The reader also accepts other namings (experts.0.gate_up_proj, w1 …),
#: so that ``re:.*up_proj$`` would include gate_proj for it alone.
PATTERNS = [
    r"re:.*",
    r"re:.*mlp.*",
    r"re:.*mlp\.experts\..*",
    r"re:.*experts\.[02]\..*",
    r"re:.*experts\.\d+\.(gate_proj|down_proj)$",
    r"re:.*down_proj$",
    r"re:.*gate_proj",
    r"re:.*mlp\.gate$",
    r"re:.*self_attn\.[qkv]_proj$",
    r"re:.*self_attn.*",
    r"re:.*layers\.1\..*",
    r"re:model\.layers\.0\.mlp\..*",
    r"re:^model\.layers\.\d+\.mlp\.experts\.1\.",
    r"re:.*lm_head",
    r"re:lm_head",
    r"re:mlp",
    r"re:.*vision.*",
    r"re:(?!.*experts).*proj$",
]
CLASSES = ["Linear", "Linear", "Module", "Embedding", "Attention", "TinyMoeExperts", "Linear4bit"]
NAMES = [
    *(f"model.layers.{i}.self_attn.{n}_proj" for i in range(LAYERS) for n in "qkvo"),
    *(f"model.layers.{i}.mlp.gate" for i in range(LAYERS)),
    *(
        f"model.layers.{i}.mlp.experts.{e}.{n}_proj"
        for i in range(LAYERS)
        for e in range(EXPERTS)
        for n in ("gate", "up", "down")
    ),
    "lm_head",
]


class Attention(nn.Module):
    pass


class TinyMoeExperts(nn.Module):
    pass


def model() -> nn.Module:
    """A model whose linear modules are ``NAMES``, with containers of the classes that configs name."""
    root = nn.Module()
    for name in NAMES:
        module, *parts = root, *name.split(".")
        for part in parts[:-1]:
            kind = {"self_attn": Attention, "experts": TinyMoeExperts}.get(part, nn.Module)
            if not hasattr(module, part):
                module.add_module(part, kind())
            module = getattr(module, part)
        module.add_module(parts[-1], nn.Linear(SIZE, SIZE, bias=False, dtype=torch.bfloat16))
    return root


def generated(seed: int) -> dict[str, Any]:
    """A config whose groups differ in the number of bits."""
    draw = random.Random(seed)
    groups = {}
    for i in range(draw.randint(1, 4)):
        kinds = draw.choices([NAMES, PATTERNS, CLASSES], [2, 4, 2], k=draw.randint(1, 4))
        weights = {"type": "int", "num_bits": 8 - i, "strategy": "channel"}
        groups[f"group_{i}"] = {"targets": [draw.choice(kind) for kind in kinds], "weights": weights}
    ignore = [draw.choice(draw.choice([NAMES, PATTERNS[1:], CLASSES[2:]])) for _ in range(draw.randint(0, 2))]
    return {"config_groups": groups, "ignore": ignore}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("model")
    save_file(model().state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    return Checkpoint.open(folder)


def linear(checkpoint: Checkpoint, name: str) -> LayerExperts:
    """The module as formats see a linear layer."""
    return LayerExperts(
        checkpoint,
        prefix=name,
        block=name.rpartition(".")[0],
        index=0,
        num_experts=1,
        stacked_names=False,
        _names={("down", "weight"): (f"{name}.weight",)},
        _infos={("down", "weight"): checkpoint.info(f"{name}.weight")},
    )


@pytest.mark.parametrize("seed", range(60))
def test_groups_of_generated_configs(checkpoint: Checkpoint, seed: int) -> None:
    """``ignore`` is not read: ignored modules have no quantized tensors."""
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    config = QuantizationConfig(**generated(seed))
    theirs = model()
    apply_quantization_config(theirs, config, show_progress=False)
    everything = model()
    apply_quantization_config(everything, config.model_copy(update={"ignore": []}), show_progress=False)
    # as the library writes it
    quantization = json.loads(json.dumps(config.model_dump()))
    for name in NAMES:
        scheme = getattr(everything.get_submodule(name), "quantization_scheme", None)
        layer = linear(checkpoint, name)
        if scheme is None:
            assert not hasattr(theirs.get_submodule(name), "quantization_scheme")
            with pytest.raises(CheckpointError, match="config_groups"):
                quant_group(quantization, layer)
            continue
        group = quant_group(quantization, layer)
        assert group.weights.num_bits == scheme.weights.num_bits, name
        kept = getattr(theirs.get_submodule(name), "quantization_scheme", scheme)
        assert kept.weights.num_bits == group.weights.num_bits, name


def test_generated_configs_differ() -> None:
    """Most have several groups and some an ``ignore``."""
    configs = [generated(seed) for seed in range(60)]
    assert sum(len(config["config_groups"]) > 1 for config in configs) > 30
    assert sum(bool(config["ignore"]) for config in configs) > 20
