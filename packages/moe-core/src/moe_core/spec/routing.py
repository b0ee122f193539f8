"""Routing methods in torch: from router logits to expert ids and weights.

:func:`route` is the reference. :func:`moe_core.kernels.ops.routing.fused_route` computes the same in one kernel, bit
for bit. One pipeline covers every method (``l`` are the logits of a token; all arithmetic is in float32)::

    score  = softmax(l) | sigmoid(l) | sqrt(softplus(l)) | l
    choice = score + correction_bias                 # the bias affects the choice, never the weight
    keep the topk_group best of num_expert_group groups   # with a bias: by the sum of a group's two best choices;
                                                          # without: by its best choice
    ids    = the top_k largest choices, best first; on ties the lower id
    weight = score[ids]                              # or softmax of the chosen logits alone
    weight = weight / (sum(weight) + 1e-20)          # if renormalize
    weight = weight * routed_scaling_factor

Without a bias the choice is made on the logits: the score grows with the logit, and logits can still differ where
their scores round to the same float32.

NaN handling: a NaN logit counts as -inf. An expert whose logit is -inf, or whose choice is NaN, comes after all
others; its weight is 0 with sigmoid and softmax. A row that contains only NaN or -inf gets ids 0, 1, ... and, with
softmax, equal weights. Ids are in range and distinct for every input.
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

#: ``(router_logits [M, E], top_k=..., renormalize=...) -> (weights [M, k], ids [M, k])``.
CustomRouting = Callable[..., tuple[Tensor, Tensor]]

SCORING_FUNCS = ("softmax", "sigmoid", "sqrtsoftplus", "none")
LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

#: Added to the sum before renormalization, so that a row of zero scores gives zeros.
RENORM_EPSILON = 1e-20


class RoutingMethodType(IntEnum):
    """Routing methods, under the names that kernels use."""

    Default = 0  # softmax -> top-k
    Renormalize = 1  # top-k -> softmax
    DeepSeekV3 = 2  # sigmoid -> + bias -> two best per group -> groups -> top-k -> renormalize
    Llama4 = 3  # top-1 -> sigmoid
    RenormalizeNaive = 4  # softmax -> top-k -> renormalize
    TopK = 5  # top-k of the logits, which are also the weights
    SigmoidRenorm = 6  # sigmoid -> top-k -> renormalize
    MiniMax2 = 7  # sigmoid -> + bias -> top-k -> renormalize
    Sigmoid = 8  # sigmoid -> top-k
    Unspecified = 9  # none of these
    DeepseekV4 = 100  # sqrt(softplus) -> + bias -> top-k -> renormalize
    Custom = 101  # a callable
    Simulated = 102  # load tests of engines; not supported here


@dataclass(frozen=True)
class RoutingConfig:
    """How router logits become expert ids and weights; see the module docstring.

    Attributes:
        scoring_func: ``"softmax"``, ``"sigmoid"``, ``"sqrtsoftplus"`` or ``"none"`` (the logit itself).
        renormalize: Divide the chosen weights by their sum.
        score_selected_only: Score only the chosen logits (softmax after top-k, Llama 4's sigmoid).
        num_expert_group: Number of expert groups of equal size.
        topk_group: Number of groups that a token may use.
        routed_scaling_factor: Factor of the final weights.
        has_correction_bias: Whether a bias ``[E]`` is added for the choice.
        custom: Callable that replaces all of this: ``custom(router_logits, top_k=..., renormalize=...)``.
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
            raise ConfigError("scoring_func 'none' cannot be combined with renormalize, has_correction_bias or groups")
        if self.score_selected_only and (
            self.scoring_func not in ("softmax", "sigmoid") or self.has_correction_bias or self.is_grouped
        ):
            raise ConfigError(
                "score_selected_only needs scoring_func softmax or sigmoid, and cannot be combined with "
                "has_correction_bias or groups"
            )
        if self.is_grouped:
            if self.topk_group is None:
                raise ConfigError(f"num_expert_group {self.num_expert_group} needs topk_group")
            if not 1 <= self.topk_group <= self.groups:
                raise ConfigError(f"topk_group must be within 1..num_expert_group {self.groups}, got {self.topk_group}")

    @property
    def groups(self) -> int:
        """Number of groups; 1 without grouping."""
        return self.num_expert_group or 1

    @property
    def is_grouped(self) -> bool:
        """Whether experts are chosen from the best groups only."""
        return self.groups > 1

    @property
    def method(self) -> RoutingMethodType:
        """The corresponding method; Unspecified for a combination without a name, which works too."""
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
        """Make the config of a named method.

        DeepSeekV3, MiniMax2 and DeepseekV4 use a correction bias.

        Args:
            method: The method or its name.
            num_expert_group: Number of expert groups; required for DeepSeekV3, invalid for the others.
            topk_group: Number of groups that a token may use.
            routed_scaling_factor: Factor of the final weights.
            custom: Routing callable; required for Custom.

        Returns:
            The config.

        Raises:
            ConfigError: An argument does not fit the method, or the method is Unspecified or Simulated, which define
                no computation.
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
            raise ConfigError(
                f"routing method {method.name} does not define a computation: pass the fields of RoutingConfig"
            )
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
        """Parse a text such as ``"sigmoid,renormalize,routed_scaling_factor=2.5"``.

        The text starts with a scoring function or with the name of a method ("DeepSeekV3"). After a scoring function,
        every flag that is not named is off. Numeric fields are given as ``name=number``.

        Args:
            text: The text.

        Returns:
            The config.

        Raises:
            ConfigError: The text is invalid.
        """
        check_instance("text", text, str)
        first, *rest = (part.strip() for part in text.split(","))
        is_method = first not in SCORING_FUNCS
        if is_method and first.lower() not in {method.name.lower() for method in RoutingMethodType}:
            known = ", ".join([*SCORING_FUNCS, *(method.name for method in RoutingMethodType)])
            raise ConfigError(f"routing {first!r} is unknown; known: {known}")
        # The name of a method determines the flags.
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
        """Check that this routing is valid for a layer.

        Args:
            num_experts: Number of experts E.
            top_k: Number of experts per token.

        Raises:
            ConfigError: It is not.
        """
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


#: Fields that :meth:`RoutingConfig.parse` accepts after the first entry.
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


#: (scoring_func, renormalize, score_selected_only) of the methods without bias and groups.
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
    """Check that the arguments of a routing function fit together.

    Args:
        router_logits: [M, E] float32, bfloat16 or float16.
        top_k: Number of experts per token.
        config: The routing.
        correction_bias: [E], if and only if ``config.has_correction_bias``.

    Raises:
        TensorError: A tensor has the wrong shape, dtype or device, or the bias is missing or not allowed.
        ConfigError: The routing is invalid for this layer.
    """
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
    """Compute expert ids and weights from router logits, best expert first.

    See the module docstring for the methods and NaN handling.

    Args:
        router_logits: [M, E] float32, bfloat16 or float16, any strides.
        top_k: Number of experts k per token.
        config: The routing.
        correction_bias: [E], if and only if ``config.has_correction_bias``.

    Returns:
        ``topk_weights`` [M, k] float32 and ``topk_ids`` [M, k] int32.

    Raises:
        TensorError: A tensor does not fit.
        ConfigError: The routing is invalid for this layer.
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
    # Keys are unique because they include the expert id, so no stable sort is needed.
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
    """Call the custom routing and check the shape and dtype of its result.

    Ids out of range become -1 (no expert).

    Args:
        router_logits: [M, E].
        top_k: Number of experts k per token.
        config: Routing with a ``custom`` callable.

    Returns:
        ``topk_weights`` [M, k] float32 and ``topk_ids`` [M, k] int32.

    Raises:
        ConfigError: ``config`` has no callable.
        TensorError: The result is invalid.
    """
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
    # Checked before the conversion to 32 bits: 2**32 + 1 must not become expert 1.
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
    """exp(l - max l) per row; the maximum itself gives 1, which avoids inf - inf."""
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
