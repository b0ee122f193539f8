"""Routing and activation of each model family, as its modeling code implements them.

A family is a ``model_type`` of transformers (that of the language model, without ``_text``). Sizes are read from
config.json. Some config.json entries change routing or activation. :attr:`Family.reads` lists those that the family's
code reads, with the defaults of its configuration class. Everything else is fixed by the code, and a config.json that
states another value is contradictory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

from moe_core.spec.activation import MoEActivation


class Required(Enum):
    """Marker for an entry without a default, which config.json must state."""

    REQUIRED = "required"


REQUIRED: Final = Required.REQUIRED


@dataclass(frozen=True)
class Family:
    """Routing and activation of one model family.

    Attributes:
        scoring: A scoring function of :mod:`moe_core.spec.routing`.
        renormalize: Whether the weights of the selected experts are divided by their sum.
        selected_only: Whether ``scoring`` is applied to the selected logits only.
        router_bias: Whether the router has a bias; a checkpoint without it is incomplete.
        correction_bias: Whether the router has a correction bias; a checkpoint without it is incomplete.
        expert_bias: Whether every matrix of an expert has a bias; a checkpoint without it is incomplete.
        weight_on_input: Whether the router weight multiplies the experts' input.
        activation: Fixed activation, whatever config.json calls it; None if config.json names it.
        hidden_act: Default of the activation entry in config.json.
        reads: config.json entries that the family's code reads, with their defaults. Keys are the first of the names
            in :mod:`moe_core.checkpoint.config.keys`.
        outside: Entries that seem to change what experts compute but act elsewhere in the model.
        per_call: Why this package does not compute the routing, so that each call needs topk_weights and topk_ids;
            None if it does.
    """

    scoring: str = "softmax"
    renormalize: bool = False
    selected_only: bool = False
    router_bias: bool = False
    correction_bias: bool = False
    expert_bias: bool = False
    weight_on_input: bool = False
    activation: MoEActivation | None = None
    hidden_act: str | Required = "silu"
    reads: Mapping[str, object] = field(default_factory=dict)
    outside: frozenset[str] = frozenset()
    per_call: str | None = None


NORM, SCALE, GROUPS, TOP_GROUPS = "norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group"


def _softmax(renormalize: bool | Required) -> Family:
    """Softmax over all experts, renormalized if config.json requests it."""
    return Family(reads={NORM: renormalize})


def _deepseek(
    scale: float | Required,
    groups: int | Required = 1,
    top_groups: int | Required = 1,
    renormalize: bool | Required = True,
    *,
    limit: float | None = None,
    hidden_act: str | Required = "silu",
) -> Family:
    """DeepSeek-V3's router: sigmoid, correction bias, expert groups."""
    reads: dict[str, object] = {NORM: renormalize, SCALE: scale, GROUPS: groups, TOP_GROUPS: top_groups}
    family = Family(scoring="sigmoid", correction_bias=True, reads=reads, hidden_act=hidden_act)
    if limit is None:
        return family
    # With a limit the activation is SiLU, whatever config.json names.
    return replace(family, activation=MoEActivation.SILU, reads={**reads, "swiglu_limit": limit})


def _kimi_linear() -> Family:
    """Kimi Linear, and Kimi K3 with its SiTU activation."""
    family = _deepseek(2.446)
    situ = {"activation_situ_beta": REQUIRED, "activation_situ_linear_beta": None}
    return replace(family, reads={**family.reads, **situ})


def _biased(**reads: object) -> Family:
    """Sigmoid, correction bias, always renormalized, no expert groups."""
    return Family(scoring="sigmoid", renormalize=True, correction_bias=True, reads=reads)


def _gpt_oss() -> Family:
    return Family(
        renormalize=True,
        selected_only=True,
        router_bias=True,
        expert_bias=True,
        activation=MoEActivation.SWIGLUOAI,
        reads={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    )


def _per_call(why: str, hidden_act: str = "silu") -> Family:
    return Family(per_call=why, hidden_act=hidden_act)


_MIXTRAL = Family(renormalize=True)
_GRANITE = Family(renormalize=True, selected_only=True)
_DEEPSEEK_V2 = Family(reads={"topk_method": "greedy", SCALE: 1.0, GROUPS: None, TOP_GROUPS: None})
_GEMMA = _per_call("its router normalizes the hidden states and scales each expert's weight", "gelu_pytorch_tanh")

FAMILIES: dict[str, Family] = {
    "afmoe": _biased(**{SCALE: 1.0}),
    "axk1": _deepseek(2.5, 8, 4),
    # Expert groups are not listed: its code gives experts of other groups a score of 0 instead of excluding them.
    "axk2": Family(scoring="sigmoid", correction_bias=True, reads={NORM: True, SCALE: 2.5}),
    "bailing_hybrid": _deepseek(2.5, 8, 4),
    # Ling 1 and Ling 2 share this model_type; config.json entries distinguish them.
    "bailing_moe": Family(
        correction_bias=True,
        reads={
            "scoring_func": "softmax",
            "use_expert_bias": False,
            NORM: REQUIRED,
            SCALE: 1.0,
            GROUPS: None,
            TOP_GROUPS: None,
        },
        hidden_act=REQUIRED,
    ),
    "bailing_moe_v2": _deepseek(REQUIRED, REQUIRED, REQUIRED, REQUIRED, hidden_act=REQUIRED),
    "beam": _deepseek(2.5, 8, 4),
    "cohere2_moe": Family(renormalize=True, selected_only=True, reads={"scoring_func": "softmax", NORM: True}),
    "deepseek_ocr2": _DEEPSEEK_V2,
    "deepseek_v2": _DEEPSEEK_V2,
    "deepseek_v3": _deepseek(2.5, 8, 4),
    "deepseek_vl_v2": _DEEPSEEK_V2,
    "deepseek_v32": _deepseek(2.5, 8, 4),
    "deepseek_v4": Family(
        scoring="sqrtsoftplus",
        renormalize=True,
        correction_bias=True,
        reads={"scoring_func": "sqrtsoftplus", SCALE: 1.5, "swiglu_limit": 10.0, "num_hash_layers": 3},
    ),
    "diffusion_gemma": _GEMMA,
    "dots1": _deepseek(1.0, renormalize=False),
    "dots3_note": _deepseek(1.0),
    "ernie4_5_moe": Family(renormalize=True, correction_bias=True),
    "exaone_moe": _deepseek(2.5),
    "flex_olmo": _softmax(False),
    "flint": Family(scoring="sigmoid", reads={NORM: True}),
    "gemma4": _GEMMA,
    "glm4_moe": _deepseek(1.0),
    "glm4_moe_lite": _deepseek(1.8),
    "glm4v_moe": _deepseek(1.0),
    "glm5_next": _deepseek(2.5, limit=10.0),
    "glm_moe_dsa": _deepseek(2.5),
    "gpt_oss": _gpt_oss(),
    "granitemoe": _GRANITE,
    "granitemoe_swa": _GRANITE,
    "granitemoehybrid": _GRANITE,
    "granitemoeshared": _GRANITE,
    "hunyuan_v1_moe": _MIXTRAL,
    "hy_v3": _biased(**{SCALE: 2.826}),
    "hy_v4": _deepseek(2.827, limit=10.0),
    "hy_v4_vl": _deepseek(2.827, limit=10.0),
    "inkling": _per_call("its router weighs routed experts against the shared ones"),
    "jamba": Family(),
    "kimi_k2": _deepseek(REQUIRED, REQUIRED, REQUIRED, REQUIRED, hidden_act=REQUIRED),
    "kimi_linear": _kimi_linear(),
    "kolibri1": _per_call("its correction bias is added to the logits, not to their scores"),
    "laguna": _biased(**{SCALE: 1.0}),
    "lara_mini": _softmax(True),
    "lfm2_moe": Family(
        scoring="sigmoid",
        correction_bias=True,
        activation=MoEActivation.SILU,
        reads={NORM: True, SCALE: 1.0, "use_expert_bias": True},
    ),
    "llama4": Family(scoring="sigmoid", selected_only=True, weight_on_input=True),
    "longcat_flash": _per_call("some of its experts are identities without weights"),
    "mellum": _softmax(True),
    "mimo_v2": _deepseek(1.0),
    "mimo_v2_flash": _deepseek(1.0),
    "minimax": Family(renormalize=True, outside=frozenset({"mlp_alpha_factor", "mlp_beta_factor"})),
    "minimax_m2": replace(_biased(), outside=frozenset({"layernorm_mlp_alpha", "layernorm_mlp_beta"})),
    "minimax_m3_vl": Family(
        scoring="sigmoid",
        renormalize=True,
        correction_bias=True,
        activation=MoEActivation.SWIGLUOAI,
        reads={SCALE: 2.0, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    ),
    # Expert groups are not listed: its code ranks groups by their two best scores, which is implemented here only
    # together with a correction bias.
    "mistral4": Family(reads={NORM: True, SCALE: 1.0}),
    "mistral_large4": Family(renormalize=True, reads={SCALE: 1.0}),
    "mixtral": _MIXTRAL,
    "nemotron_h": _deepseek(1.0, hidden_act="relu2"),
    "olmoe": _softmax(False),
    "openai_privacy_filter": _gpt_oss(),
    "phimoe": _per_call("it draws experts one after the other and masks the logits in between (SparseMixer)"),
    "qwen2_moe": _softmax(False),
    "qwen3_5_moe": _MIXTRAL,
    "qwen3_moe": _softmax(False),
    "qwen3_next": _softmax(True),
    "qwen3_omni_moe": _softmax(True),
    "qwen3_omni_moe_talker": _softmax(False),
    "qwen3_vl_moe": _MIXTRAL,
    "qwen4_exp": _softmax(True),
    "sarvam_mla": _deepseek(2.5),
    "sarvam_moe": _deepseek(2.5),
    "solar_open": _deepseek(1.0),
    "step3p5": Family(
        scoring="sigmoid",
        renormalize=True,
        correction_bias=True,
        activation=MoEActivation.SWIGLUSTEP,
        reads={SCALE: 1.0, "swiglu_limit": None},
        outside=frozenset({"swiglu_limits_shared"}),
    ),
    "unlimited_ocr": Family(reads={**_DEEPSEEK_V2.reads, GROUPS: 1, TOP_GROUPS: 1}),
    "zaya": _per_call("its router is a network of its own, which goes on from one layer to the next"),
}

#: Model families that :class:`~moe_core.spec.config.FusedMoEConfig` cannot represent, with the reason.
REFUSED: dict[str, str] = {
    "aria": "its experts' tensors are named fc1 and fc2",
    "dbrx": "its experts' tensors are named mlp.w1, mlp.v1 and mlp.w2, one [E N, K] for all of them",
    "doge": "its experts are single rows of an embedding",
    "dots3_note_vision_encoder": "it is a vision encoder",
    "ernie4_5_vl_moe": "each of its layers has two sets of experts of different sizes",
    "inkling2": "soft caps bound its experts' gate and up",
    "inkling2_loop": "soft caps bound its experts' gate and up",
    "jetmoe": "its attention has experts too, and a bias is added to the experts' sum",
    "muse_spark": "each expert's output is normalized",
    "nllb-moe": "its experts have a capacity, and tokens beyond it are left out",
    "switch_transformers": "its experts have a capacity, and tokens beyond it are left out",
    "vitpose_backbone": "its experts are chosen by the data set",
}

#: Default stack of layers for models with experts in several stacks.
DEFAULT_STACKS: dict[str, str] = {"qwen3_omni_moe": "thinker"}


def guess(*, corrects: bool) -> Family:
    """Return the assumed routing and activation of an unknown family.

    Args:
        corrects: Whether the checkpoint has a correction bias.

    Returns:
        A family with sigmoid scoring if there is a correction bias, else softmax.
    """
    read = dict.fromkeys((NORM, SCALE, GROUPS, TOP_GROUPS, "swiglu_limit", "use_expert_bias"))
    scoring = "sigmoid" if corrects else "softmax"
    reads = {**read, "scoring_func": scoring, "topk_method": None}
    return Family(scoring=scoring, correction_bias=corrects, reads=reads, hidden_act=REQUIRED)


def family_names(model_type: str) -> tuple[str, ...]:
    """Return the names under which the tables may list a ``model_type``.

    Args:
        model_type: ``model_type`` of the whole model or of its text part.

    Returns:
        The name itself and the name without ``_text`` or ``_thinker``.
    """
    return (model_type, model_type.removesuffix("_text"), model_type.removesuffix("_thinker"))


def family_of(model_type: str) -> Family | None:
    """Return the family of a model.

    Args:
        model_type: ``model_type`` of the whole model or of its text part.

    Returns:
        The family, or None if it is unknown.
    """
    return next((FAMILIES[name] for name in family_names(model_type) if name in FAMILIES), None)


def refusal_of(model_type: str) -> str | None:
    """Return why a model's experts are not supported.

    Args:
        model_type: ``model_type`` of the whole model or of its text part.

    Returns:
        The reason, or None if the model is not refused.
    """
    return next((REFUSED[name] for name in family_names(model_type) if name in REFUSED), None)
