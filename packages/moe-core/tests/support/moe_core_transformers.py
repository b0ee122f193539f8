"""Every MoE family that transformers has, found in transformers itself, as a tiny random model."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

E, TOP_K, K, N = 16, 2, 32, 24

#: what a configuration class calls the number of experts
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

SIZES: dict[str, Any] = {
    **dict.fromkeys(COUNTS, E),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "top_k_experts"), TOP_K
    ),
    **dict.fromkeys(("hidden_size", "d_model"), K),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size", "ffn_hidden_size"), N),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 8),
    **dict.fromkeys(("shared_intermediate_size", "shared_experts_intermediate_size", "share_expert_dim"), 8),
    **dict.fromkeys(("num_shared_experts", "n_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "expert_layer_offset"), 0),
    **dict.fromkeys(("decoder_sparse_step", "expert_layer_period"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "v_head_dim", "head_dim", "index_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "index_topk", "mamba_d_state"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("index_n_heads", "linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"), 2),
    **dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers", "pad_token_id", "bos_token_id"), 0),
    **dict.fromkeys(("layer_types", "mlp_layer_types"), None),
    "vocab_size": 64,
    "vocab_size_per_layer_input": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "eos_token_id": 1,
}

#: what single families need besides
OWN: dict[str, dict[str, Any]] = {
    "beam": {"mlp_layer_types": ["sparse"] * 2},
    # their mean with shared experts is the block's
    "cohere2_moe": {"num_shared_experts": 0},
    "deepseek_ocr2_text": {"mlp_layer_types": ["sparse"] * 2},
    "deepseek_v4": {"mlp_layer_types": ["moe"] * 2},
    "flint": {"mlp_only_layers": []},
    "gemma4_text": {"enable_moe_block": True},
    "glm5_next_text": {"index_topk": 16, "qk_rope_head_dim": 0, "mlp_layer_types": ["sparse"] * 2},
    "granitemoehybrid": {"mamba_n_heads": 4},
    "hy_v4_vl_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0]}},
    "lfm2_moe": {"layer_types": ["full_attention"] * 2},
    "llama4_text": {"num_experts_per_tok": 1},
    "longcat_flash": {"zero_expert_num": 0},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 8},
    "step3p5": {"mlp_layer_types": ["sparse"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}


@functools.cache
def families() -> dict[str, type[PreTrainedConfig]]:
    """Configuration classes that count experts, by their model_type, or by their folder where they have none."""
    found = {}
    folder = Path(inspect.getfile(transformers)).parent / "models"
    for file in sorted(folder.glob("*/configuration_*.py")):
        if not any(name in file.read_text(encoding="utf-8") for name in COUNTS):
            continue
        module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
        for config in vars(module).values():
            if not (inspect.isclass(config) and issubclass(config, PreTrainedConfig)):
                continue
            names = {*inspect.signature(config).parameters, *(config.attribute_map or {})}
            if config.__module__ == module.__name__ and names & set(COUNTS):
                found[config.model_type or file.parent.name] = config
    return found


def tiny_config(model_type: str, **entries: Any) -> PreTrainedConfig:
    """A configuration with the sizes of this file; ``entries``: what it says besides."""
    config = families()[model_type]
    # what a class maps to another name it takes by that one
    own = {name for name in config().to_dict() if name not in (config.attribute_map or {})}
    sizes = {name: size for name, size in SIZES.items() if name in own}
    return config(**{**sizes, **OWN.get(model_type, {}), **entries})


def omni_model() -> PreTrainedModel:
    """Qwen3-Omni: two stacks of layers with experts, and what is around them."""
    from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

    text = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 8}
    code = {**text, "hidden_size": 16}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": K}
    audio = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "output_dim": K}
    wave = {"codebook_size": 8, "codebook_dim": 8, "decoder_dim": 16, "upsample_rates": [2], "upsampling_ratios": [2]}
    config = Qwen3OmniMoeConfig(
        thinker_config={
            "text_config": tiny_config("qwen3_omni_moe_text").to_dict(),
            "vision_config": {**vision, "deepstack_visual_indexes": [0], "num_position_embeddings": 4},
            "audio_config": {**audio, "downsample_hidden_size": 4, "num_mel_bins": 16},
        },
        talker_config={
            "text_config": tiny_config("qwen3_omni_moe_talker_text").to_dict(),
            "thinker_hidden_size": K,
            "spatial_merge_size": 2,
            "code_predictor_config": {**code, "head_dim": 8, "vocab_size": 16},
        },
        code2wav_config={**code, **wave, "num_quantizers": 2},
    )
    return randomized(Qwen3OmniMoeForConditionalGeneration(config))


def tiny_model(model_type: str, **entries: Any) -> PreTrainedModel:
    """The smallest model of transformers with :func:`tiny_config`, with random parameters and buffers."""
    config = tiny_config(model_type, **entries)
    return randomized(smallest_class(type(config))(config))


def randomized(model: PreTrainedModel) -> PreTrainedModel:
    """``model`` with random parameters and buffers; shared experts' are 0."""
    generator = torch.Generator().manual_seed(len(model.config.model_type))
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point() and "rotary" not in name:
                tensor.normal_(0, 0 if "shared" in name else 0.5, generator=generator)
    return model.eval()


def smallest_class(config: type[PreTrainedConfig]) -> type[PreTrainedModel]:
    name = config.__module__.replace(".configuration_", ".modeling_")
    if importlib.util.find_spec(name) is None:
        # a configuration of another family's model
        return transformers.MODEL_MAPPING[config]
    module = importlib.import_module(name)
    classes = [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, PreTrainedModel)
        and value.config_class is config
        and value.__module__ == module.__name__
        and "PreTrained" not in value.__name__
    ]
    return min(classes, key=lambda value: (not value.__name__.endswith("Model"), len(value.__name__)))


def moe_blocks(model: nn.Module, stack: str = "") -> Iterator[tuple[int, nn.Module]]:
    """(layer, module) of everything that has experts and a name that begins with ``stack``."""
    for name, module in model.named_modules():
        if name.startswith(stack) and isinstance(getattr(module, "experts", None), nn.Module):
            yield next(int(part) for part in reversed(name.split(".")) if part.isdigit()), module


def first(output: Any) -> Tensor:
    """The hidden states of what a module returns."""
    result = output[0] if isinstance(output, tuple) else output
    assert isinstance(result, Tensor)
    return result
