"""How each model family routes: what its code does and its config.json does not say.

Only what differs from one family to the next stands here; sizes and switches are read from config.json.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_core.activation import MoEActivation


@dataclass(frozen=True)
class Family:
    """One family's routing.

    - ``scoring``: unless config.json names a scoring function
    - ``renormalize``: unless config.json says so; ``fixed_renormalize``: whatever config.json says
    - ``selected_only``: the chosen logits alone are scored
    - ``bias``: the router has a correction bias; without it a checkpoint is incomplete
    - ``grouped``: experts are chosen within groups where config.json has more than one
    - ``weight_on_input``: the router weight multiplies the experts' input
    - ``activation``: instead of what config.json calls it
    """

    scoring: str = "softmax"
    renormalize: bool = False
    fixed_renormalize: bool = False
    selected_only: bool = False
    bias: bool = False
    grouped: bool = False
    weight_on_input: bool = False
    activation: MoEActivation | None = None


_SOFTMAX = Family()
_SOFTMAX_RENORM = Family(renormalize=True)
_MIXTRAL = Family(renormalize=True, fixed_renormalize=True)
_DEEPSEEK_V3 = Family(scoring="sigmoid", renormalize=True, bias=True, grouped=True)

FAMILIES: dict[str, Family] = {
    "afmoe": Family(scoring="sigmoid", renormalize=True, bias=True, grouped=True),
    "bailing_moe": _SOFTMAX_RENORM,
    "bailing_moe_v2": _DEEPSEEK_V3,
    "deepseek_v2": Family(grouped=True),
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": _DEEPSEEK_V3,
    "dots1": Family(scoring="sigmoid", bias=True, grouped=True),
    "ernie4_5_moe": Family(renormalize=True, fixed_renormalize=True, bias=True),
    "exaone_moe": _DEEPSEEK_V3,
    "flex_olmo": _SOFTMAX,
    "glm4_moe": _DEEPSEEK_V3,
    "glm4_moe_lite": _DEEPSEEK_V3,
    "glm4v_moe": _DEEPSEEK_V3,
    "glm_moe_dsa": _DEEPSEEK_V3,
    "gpt_oss": Family(renormalize=True, fixed_renormalize=True, selected_only=True, activation=MoEActivation.SWIGLUOAI),
    "granitemoe": Family(renormalize=True, fixed_renormalize=True, selected_only=True),
    "granitemoehybrid": Family(renormalize=True, fixed_renormalize=True, selected_only=True),
    "granitemoeshared": Family(renormalize=True, fixed_renormalize=True, selected_only=True),
    "hunyuan_v1_moe": _MIXTRAL,
    "jamba": _SOFTMAX,
    "kimi_k2": _DEEPSEEK_V3,
    "lfm2_moe": Family(scoring="sigmoid", renormalize=True, bias=True),
    "llama4": Family(scoring="sigmoid", fixed_renormalize=True, selected_only=True, weight_on_input=True),
    "mimo_v2_flash": _DEEPSEEK_V3,
    "minimax": _MIXTRAL,
    "minimax_m2": Family(scoring="sigmoid", renormalize=True, fixed_renormalize=True, bias=True),
    "mixtral": _MIXTRAL,
    "nemotron_h": _DEEPSEEK_V3,
    "olmoe": _SOFTMAX,
    "qwen2_moe": _SOFTMAX,
    "qwen3_5_moe": _MIXTRAL,
    "qwen3_moe": _SOFTMAX,
    "qwen3_next": _SOFTMAX_RENORM,
    "qwen3_omni_moe": _SOFTMAX_RENORM,
    "qwen3_vl_moe": _MIXTRAL,
    "solar_open": _DEEPSEEK_V3,
}

#: Families whose routing is none of the methods of :mod:`moe_core.routing`, and why.
UNROUTABLE = {
    "phimoe": "it draws experts one after the other and masks the logits in between (SparseMixer)",
    "longcat_flash": "some of its experts are identities without weights",
}


def family_of(model_type: str) -> Family | None:
    """The family of a ``model_type`` (of the whole model or of its text part); None for an unknown one."""
    for name in (model_type, model_type.removesuffix("_text"), model_type.removesuffix("_thinker")):
        if name in FAMILIES:
            return FAMILIES[name]
    return None
