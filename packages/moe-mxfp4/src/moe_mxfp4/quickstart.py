"""Small random-weight checkpoint in the format of OpenAI's gpt-oss releases."""

from __future__ import annotations

from moe_core import kMxfp4Static, quantize_weight
from moe_core.api.formats import SmallModel
from torch import Tensor


def _store(weight: Tensor) -> dict[str, Tensor]:
    experts, rows, columns = weight.shape
    # All rows have the same distribution, so any row order is equally valid.
    codes, scale, *_ = quantize_weight(weight, kMxfp4Static)
    return {
        "_blocks": codes.view(experts, rows, columns // 32, 16),
        "_scales": scale,
        # Any values serve as a bias.
        "_bias": weight[..., 0].bfloat16(),
    }


MODEL = SmallModel(
    {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "experts_per_token": SmallModel.TOP_K,
        "hidden_act": "silu",
        "hidden_size": SmallModel.HIDDEN,
        "intermediate_size": SmallModel.INTERMEDIATE,
        "model_type": "gpt_oss",
        "num_experts_per_tok": SmallModel.TOP_K,
        "num_hidden_layers": 2,
        "num_local_experts": SmallModel.EXPERTS,
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        "swiglu_limit": 7.0,
    },
    _store,
    {
        "gate_up_proj": (2 * SmallModel.INTERMEDIATE, SmallModel.HIDDEN),
        "down_proj": (SmallModel.HIDDEN, SmallModel.INTERMEDIATE),
    },
    router=("router.weight", "router.bias"),
    stacked=True,
)
