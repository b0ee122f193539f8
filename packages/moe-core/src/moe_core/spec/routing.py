"""From router logits to experts and weights: the routing methods of the field, in torch.

:func:`route` is the reference; :func:`moe_core.kernels.ops.routing.fused_route` is the same as one kernel and agrees
with it bit for bit.  One pipeline covers every method (``l`` the logits of a token, all arithmetic in float32)::

    score  = softmax(l) | sigmoid(l) | sqrt(softplus(l)) | l
    choice = score + correction_bias                 # the bias moves the choice, never the weight
    keep the topk_group best of num_expert_group groups   # by the sum of a group's two best choices with a bias,
                                                          # by its best choice without one
    ids    = the top_k largest choices, best first; of equal ones the lower id
    weight = score[ids]                              # or softmax of the chosen logits alone
    weight = weight / (sum(weight) + 1e-20)          # where renormalize
    weight = weight * routed_scaling_factor

Without a bias the choice is made on the logits: score grows with the logit, and logits still differ where their
scores have rounded to the same float32.

Not a number.  A NaN logit counts as -inf, and an expert whose logit is -inf (or whose choice is NaN) comes after
every other; its weight is 0 by sigmoid and softmax.  A row without any number gets ids 0, 1, ... and, by softmax,
equal weights.  Ids are in range and distinct for every input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from moe_core._support.exact import exp_nonpositive, ordered_int, sigmoid, sqrt_softplus, sum_pairwise, sum_unit_terms
from moe_core.errors import ConfigError, TensorError, check_dtype, check_instance, check_shape

#: ``(router_logits [M, E], top_k=..., renormalize=...) -> (weights [M, k], ids [M, k])``
CustomRouting = Callable[..., tuple[Tensor, Tensor]]

SCORING_FUNCS = ("softmax", "sigmoid", "sqrtsoftplus", "none")
LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

#: added to the sum before renormalising, so that a row of zero scores gives zeros
RENORM_EPSILON = 1e-20


class RoutingMethodType(IntEnum):
    """Names that kernels know routing methods by."""

    Default = 0  # softmax -> top-k
    Renormalize = 1  # top-k -> softmax
    DeepSeekV3 = 2  # sigmoid -> + bias -> two best per group -> groups -> top-k -> renormalise
    Llama4 = 3  # top-1 -> sigmoid
    RenormalizeNaive = 4  # softmax -> top-k -> renormalise
    TopK = 5  # top-k of the logits, which are the weights
    SigmoidRenorm = 6  # sigmoid -> top-k -> renormalise
    MiniMax2 = 7  # sigmoid -> + bias -> top-k -> renormalise
    Sigmoid = 8  # sigmoid -> top-k
    Unspecified = 9  # none of these
    DeepseekV4 = 100  # sqrt(softplus) -> + bias -> top-k -> renormalise
    Custom = 101  # a callable
    Simulated = 102  # load tests of engines; not computed here


@dataclass(frozen=True)
class RoutingConfig:
    """How logits become experts and weights; see the module docstring.

    - ``scoring_func``: ``"softmax"``, ``"sigmoid"``, ``"sqrtsoftplus"`` or ``"none"`` (the logit itself)
    - ``renormalize``: divide the chosen weights by their sum
    - ``score_selected_only``: score the chosen logits alone (softmax after top-k, Llama 4's sigmoid)
    - ``num_expert_group``, ``topk_group``: groups of equal size and how many of them a token may use
    - ``routed_scaling_factor``: multiplies the weights at the end
    - ``has_correction_bias``: a bias ``[E]`` takes part in the choice
    - ``custom``: a callable instead of all this, ``custom(router_logits, top_k=..., renormalize=...)``
    """

    scoring_func: str = "softmax"
    renormalize: bool = True
    score_selected_only: bool = False
    num_expert_group: int | None = None
    topk_group: int | None = None
    routed_scaling_factor: float = 1.0
    has_correction_bias: bool = False
    custom: CustomRouting | None = None

    def __post_init__(self) -> None:
        for name in ("renormalize", "score_selected_only", "has_correction_bias"):
            check_instance(name, getattr(self, name), bool)
        for name in ("num_expert_group", "topk_group"):
            check_instance(name, getattr(self, name), int, type(None))
        check_instance("routed_scaling_factor", self.routed_scaling_factor, float, int)
        if self.scoring_func not in SCORING_FUNCS:
            raise ConfigError(f"scoring_func {self.scoring_func!r} is unknown; known: {', '.join(SCORING_FUNCS)}")
        if self.scoring_func == "none" and (self.renormalize or self.has_correction_bias or self.is_grouped):
            raise ConfigError("scoring_func 'none' takes no renormalisation, correction bias or groups")
        if self.score_selected_only and (
            self.scoring_func not in ("softmax", "sigmoid") or self.has_correction_bias or self.is_grouped
        ):
            raise ConfigError("score_selected_only goes with softmax or sigmoid, without correction bias or groups")
        if self.is_grouped:
            if self.topk_group is None:
                raise ConfigError(f"num_expert_group {self.num_expert_group} needs topk_group")
            if not 1 <= self.topk_group <= self.groups:
                raise ConfigError(f"topk_group must be within 1..num_expert_group {self.groups}, got {self.topk_group}")

    @property
    def groups(self) -> int:
        """Number of groups; 1 where there are none."""
        return self.num_expert_group or 1

    @property
    def is_grouped(self) -> bool:
        """Whether experts are chosen within the best groups only."""
        return self.groups > 1

    @property
    def method(self) -> RoutingMethodType:
        """The method's name among kernels; Unspecified for a combination without one (computed all the same)."""
        if self.custom is not None:
            return RoutingMethodType.Custom
        key = (self.scoring_func, self.renormalize, self.score_selected_only)
        if self.is_grouped or self.has_correction_bias:
            if key == ("sigmoid", True, False) and self.has_correction_bias:
                return RoutingMethodType.DeepSeekV3 if self.is_grouped else RoutingMethodType.MiniMax2
            if key == ("sqrtsoftplus", True, False) and not self.is_grouped:
                return RoutingMethodType.DeepseekV4
            return RoutingMethodType.Unspecified
        return _METHODS.get(key, RoutingMethodType.Unspecified)

    @staticmethod
    def from_method(
        method: RoutingMethodType | str,
        *,
        num_expert_group: int | None = None,
        topk_group: int | None = None,
        routed_scaling_factor: float = 1.0,
        custom: CustomRouting | None = None,
    ) -> RoutingConfig:
        """The configuration of a method by name.

        DeepSeekV3, MiniMax2 and DeepseekV4 take a correction bias; DeepSeekV3 needs groups and Custom a callable.
        Unspecified and Simulated name no computation and are refused.
        """
        check_instance("method", method, RoutingMethodType, str)
        check_instance("num_expert_group", num_expert_group, int, type(None))
        if isinstance(method, str):
            known = {m.name.lower(): m for m in RoutingMethodType}
            if method.lower() not in known:
                raise ConfigError(
                    f"unknown routing method {method!r}; known: {', '.join(m.name for m in RoutingMethodType)}"
                )
            method = known[method.lower()]
        if method is RoutingMethodType.Custom:
            if custom is None:
                raise ConfigError("routing method Custom needs custom=, a callable")
            return RoutingConfig(custom=custom, routed_scaling_factor=routed_scaling_factor)
        pieces = {m: (*key, False) for key, m in _METHODS.items()} | _BIASED_METHODS
        if method not in pieces:
            raise ConfigError(f"routing method {method.name} names no computation: give RoutingConfig its parts")
        scoring_func, renormalize, selected_only, bias = pieces[method]
        grouped = num_expert_group is not None and num_expert_group > 1
        if grouped != (method is RoutingMethodType.DeepSeekV3):
            rule = "has no groups" if grouped else "needs num_expert_group and topk_group"
            raise ConfigError(f"routing method {method.name} {rule}, got num_expert_group={num_expert_group}")
        return RoutingConfig(
            scoring_func=scoring_func,
            renormalize=renormalize,
            score_selected_only=selected_only,
            num_expert_group=num_expert_group,
            topk_group=topk_group,
            routed_scaling_factor=routed_scaling_factor,
            has_correction_bias=bias,
            custom=custom,
        )

    @staticmethod
    def parse(text: str) -> RoutingConfig:
        """The configuration of a text such as ``"sigmoid,renormalize,has_correction_bias,routed_scaling_factor=2.5"``.

        First comes a scoring function, with what is not named off, or a method's name ("DeepSeekV3"); fields follow by
        name, with ``=`` and a number where they are numbers.
        """
        check_instance("text", text, str)
        first, *rest = (part.strip() for part in text.split(","))
        is_method = first not in SCORING_FUNCS
        if is_method and first.lower() not in {method.name.lower() for method in RoutingMethodType}:
            known = ", ".join([*SCORING_FUNCS, *(method.name for method in RoutingMethodType)])
            raise ConfigError(f"routing {first!r} is unknown; known: {known}")
        # a method's name says what is on
        fields = {name: kind for name, kind in _TEXT_FIELDS.items() if not is_method or kind is not bool}
        values: dict[str, Any] = {}
        for part in rest:
            name, _, number = part.partition("=")
            kind = fields.get(name)
            if kind is None or (kind is bool) is bool(number):
                expected = ", ".join(_field_text(*item) for item in fields.items())
                raise ConfigError(f"routing {text!r} has {part!r}, expected {expected}")
            try:
                values[name] = True if kind is bool else kind(number)
            except ValueError:
                raise ConfigError(f"routing {text!r}: {name} is {number!r}, expected a number") from None
        if is_method:
            return RoutingConfig.from_method(first, **values)
        return RoutingConfig(scoring_func=first, **{"renormalize": False, **values})

    def check(self, *, num_experts: int, top_k: int) -> None:
        """Raise :class:`ConfigError` unless a layer of ``num_experts`` and ``top_k`` can be routed so."""
        check_instance("num_experts", num_experts, int, torch.SymInt)
        check_instance("top_k", top_k, int)
        if not 1 <= top_k <= num_experts:
            raise ConfigError(f"top_k must be within 1..{num_experts} experts, got {top_k}")
        if self.custom is not None:
            return
        if num_experts % self.groups:
            raise ConfigError(f"{num_experts} experts do not divide into num_expert_group {self.groups} equal groups")
        reach = num_experts // self.groups * (self.topk_group or 1) if self.is_grouped else num_experts
        if top_k > reach:
            raise ConfigError(
                f"top_k {top_k} is larger than the {reach} experts of topk_group {self.topk_group} groups "
                f"of {num_experts // self.groups}"
            )
        if self.method is RoutingMethodType.Llama4 and top_k != 1:
            raise ConfigError(f"routing method Llama4 takes one expert per token, got top_k {top_k}")


#: fields of :meth:`RoutingConfig.parse` after the first
_TEXT_FIELDS: dict[str, type] = {
    "renormalize": bool,
    "score_selected_only": bool,
    "has_correction_bias": bool,
    "num_expert_group": int,
    "topk_group": int,
    "routed_scaling_factor": float,
}


def _field_text(name: str, kind: type) -> str:
    return name if kind is bool else f"{name}=<number>"


#: (scoring_func, renormalize, score_selected_only) of the methods without bias and groups
_METHODS = {
    ("softmax", False, False): RoutingMethodType.Default,
    ("softmax", True, True): RoutingMethodType.Renormalize,
    ("softmax", True, False): RoutingMethodType.RenormalizeNaive,
    ("none", False, False): RoutingMethodType.TopK,
    ("sigmoid", False, True): RoutingMethodType.Llama4,
    ("sigmoid", True, False): RoutingMethodType.SigmoidRenorm,
    ("sigmoid", False, False): RoutingMethodType.Sigmoid,
    ("sqrtsoftplus", True, False): RoutingMethodType.DeepseekV4,
}
_BIASED_METHODS = {
    RoutingMethodType.DeepSeekV3: ("sigmoid", True, False, True),
    RoutingMethodType.MiniMax2: ("sigmoid", True, False, True),
    RoutingMethodType.DeepseekV4: ("sqrtsoftplus", True, False, True),
}


def check_routing_inputs(
    router_logits: Tensor, *, top_k: int, config: RoutingConfig, correction_bias: Tensor | None
) -> None:
    """Raise :class:`TensorError` or :class:`ConfigError` unless the arguments of a routing function fit together."""
    check_shape("router_logits", router_logits, ("M", "E"))
    check_dtype("router_logits", router_logits, LOGIT_DTYPES)
    check_instance("config", config, RoutingConfig)
    experts = router_logits.shape[1]
    config.check(num_experts=experts, top_k=top_k)
    if (correction_bias is not None) != config.has_correction_bias:
        found = "none was given" if correction_bias is None else "one was given"
        raise TensorError(f"correction_bias: {found}, but has_correction_bias is {config.has_correction_bias}")
    if correction_bias is not None:
        check_shape("correction_bias", correction_bias, (experts,))
        check_dtype("correction_bias", correction_bias, LOGIT_DTYPES)
        if correction_bias.device != router_logits.device:
            raise TensorError(f"correction_bias is on {correction_bias.device}, not on {router_logits.device}")


def route(
    router_logits: Tensor,
    *,
    top_k: int,
    config: RoutingConfig,
    correction_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(topk_weights [M, k] float32, topk_ids [M, k] int32) of ``router_logits`` [M, E], best expert first.

    ``router_logits``: float32, bfloat16 or float16, any strides; ``correction_bias`` [E] goes with
    ``config.has_correction_bias``.  See the module docstring for the methods and for what NaN does.
    """
    check_routing_inputs(router_logits, top_k=top_k, config=config, correction_bias=correction_bias)
    if config.custom is not None:
        return call_custom(router_logits, top_k=top_k, config=config)
    logits = router_logits.float()
    logits = torch.where(logits.isnan(), float("-inf"), logits)
    top2_groups = config.is_grouped and correction_bias is not None
    if correction_bias is None:
        choice = logits
    else:
        choice = _scores(logits, config.scoring_func) + correction_bias.float()
        choice = torch.where(choice.isnan() | (logits == float("-inf")), float("-inf"), choice)
    # unique keys: equal choices are told apart by the expert's id, so the order needs no stable sort
    experts = logits.shape[1]
    ids = torch.arange(experts, device=logits.device)
    keys = ordered_int(choice).long() * 2**20 + (experts - 1 - ids)
    if config.is_grouped:
        kept = _best_groups(choice, config, top2=top2_groups).repeat_interleave(experts // config.groups, dim=1)
        keys = torch.where(kept, keys, torch.iinfo(torch.int64).min)
    chosen = keys.topk(top_k, dim=1, sorted=True).indices
    if config.score_selected_only and config.scoring_func == "softmax":
        weights = _softmax_selected(logits.gather(1, chosen))
    elif config.scoring_func == "softmax":
        weights = _scores(logits, "softmax").gather(1, chosen)
    else:
        weights = _scores(logits.gather(1, chosen), config.scoring_func)
    if config.renormalize and not config.score_selected_only:
        weights = weights / (sum_pairwise(weights) + RENORM_EPSILON)
    return weights * config.routed_scaling_factor, chosen.int()


def call_custom(router_logits: Tensor, *, top_k: int, config: RoutingConfig) -> tuple[Tensor, Tensor]:
    """The custom routing's answer, checked for shape and dtype; ids out of range become -1, no expert."""
    if config.custom is None:
        raise ConfigError("the routing has no custom callable")
    answer: object = config.custom(router_logits, top_k=top_k, renormalize=config.renormalize)
    if not (isinstance(answer, tuple) and len(answer) == 2 and all(isinstance(item, Tensor) for item in answer)):
        raise TensorError(f"custom routing must return (weights, ids), two tensors, got {type(answer).__name__}")
    weights, ids = answer
    for name, tensor in (("weights", weights), ("ids", ids)):
        check_shape(f"custom routing's {name}", tensor, (router_logits.shape[0], top_k))
    check_dtype("custom routing's weights", weights, LOGIT_DTYPES)
    check_dtype("custom routing's ids", ids, (torch.int32, torch.int64))
    # before the ids become 32 bits wide: 2**32 + 1 must not turn into expert 1
    ids = torch.where((ids >= 0) & (ids < router_logits.shape[1]), ids, -1)
    return weights.float() * config.routed_scaling_factor, ids.int()


def _scores(logits: Tensor, scoring_func: str) -> Tensor:
    if scoring_func == "softmax":
        powers = _powers(logits)
        return powers / sum_unit_terms(powers)
    if scoring_func == "sigmoid":
        return sigmoid(logits)
    if scoring_func == "sqrtsoftplus":
        return sqrt_softplus(logits)
    return torch.where(logits == float("-inf"), 0.0, logits)


def _powers(logits: Tensor) -> Tensor:
    """exp(l - max l) per row; an infinite maximum stands for itself, so that no inf - inf appears."""
    largest = logits.amax(dim=1, keepdim=True)
    return exp_nonpositive(torch.where(logits == largest, 0.0, logits - largest))


def _softmax_selected(logits: Tensor) -> Tensor:
    powers = _powers(logits)
    return powers / sum_pairwise(powers)


def _best_groups(choice: Tensor, config: RoutingConfig, *, top2: bool) -> Tensor:
    """Bool [M, groups]: the groups that a token may use."""
    tokens, experts = choice.shape
    grouped = choice.view(tokens, config.groups, experts // config.groups)
    if top2 and grouped.shape[2] > 1:
        best = grouped.topk(2, dim=2).values
        score = best[..., 0] + best[..., 1]
        score = torch.where(score.isnan(), float("-inf"), score)
    else:
        score = grouped.amax(dim=2)
    groups = torch.arange(config.groups, device=choice.device)
    keys = ordered_int(score).long() * 2**20 + (config.groups - 1 - groups)
    best_groups = keys.topk(config.topk_group or 1, dim=1).indices
    return torch.zeros_like(score, dtype=torch.bool).scatter_(1, best_groups, True)
