"""Build a layer's RoutingConfig from config.json and the model family."""

from __future__ import annotations

from collections.abc import Sequence

from moe_core.checkpoint.config import keys as keys
from moe_core.checkpoint.config.families import Family
from moe_core.checkpoint.config.keys import ConfigKeys
from moe_core.errors import CheckpointError, ConfigError
from moe_core.spec.routing import RoutingConfig

#: Hint for messages: the argument of the API and the option of the command line.
BY_HAND = "give routing (--routing)"

# dots1 names its scoring after DeepSeek-V3's top-k method, which scores by sigmoid.
_SCORING_NAMES = {"noaux_tc": "sigmoid"}
#: Values of ``topk_method``, with whether they use expert groups.
_METHODS = {"greedy": False, "group_limited_greedy": True, "noaux_tc": True}


def read_routing(entries: ConfigKeys, family: Family, *, experts: int, top_k: int, corrects: bool) -> RoutingConfig:
    """Read the routing of a layer.

    Args:
        entries: config.json entries of the layer.
        family: The model family.
        experts: Number of experts.
        top_k: Number of experts per token.
        corrects: Whether the checkpoint has a correction bias.

    Returns:
        The routing.

    Raises:
        CheckpointError: config.json contradicts itself or the family's code.
    """
    scoring = _scoring(entries, family)
    # A softmax over the selected logits is normalized by definition; other scoring functions are not.
    selected = family.selected_only and scoring == family.scoring
    renormalize = _renormalize(entries, family, fixed=selected and scoring == "softmax")
    groups, top_groups = _groups(entries, family)
    _boolean(entries, family, keys.WEIGHT_ON_INPUT, family.weight_on_input)
    try:
        routing = RoutingConfig(
            scoring_func=scoring,
            renormalize=renormalize,
            score_selected_only=selected,
            num_expert_group=groups,
            topk_group=top_groups,
            routed_scaling_factor=_scaling(entries, family),
            has_correction_bias=_has_correction_bias(entries, family, corrects),
        )
        routing.check(num_experts=experts, top_k=top_k)
    except ConfigError as error:
        raise entries.error(str(error)) from error
    return routing


def _scoring(entries: ConfigKeys, family: Family) -> str:
    stated = entries.text(keys.SCORING)
    if stated is None:
        return family.scoring
    name = _SCORING_NAMES.get(stated, stated)
    if keys.SCORING[0] not in family.reads and name != family.scoring:
        raise _contradiction(entries, keys.SCORING, f"scores experts by {family.scoring}")
    return name


def _renormalize(entries: ConfigKeys, family: Family, *, fixed: bool) -> bool:
    if fixed and keys.RENORMALIZE[0] in family.reads:
        return True
    if keys.RENORMALIZE[0] not in family.reads:
        return _boolean(entries, family, keys.RENORMALIZE, family.renormalize)
    found = entries.boolean(keys.RENORMALIZE)
    if found is None:
        raise entries.error(f"{keys.RENORMALIZE[0]} is null, expected true or false")
    return found


def _boolean(entries: ConfigKeys, family: Family, names: Sequence[str], fixed: bool) -> bool:
    """Return the value of an entry that the family's code fixes; refuse any other value."""
    stated = entries.boolean(names)
    if stated is not None and stated is not fixed:
        raise _contradiction(entries, names, f"counts as {str(fixed).lower()}")
    return fixed


def _scaling(entries: ConfigKeys, family: Family) -> float:
    if keys.SCALING[0] not in family.reads:
        stated = entries.stated(keys.SCALING)
        # Some tools write false for "none".
        if stated is not None and stated[1] is not False and entries.number(keys.SCALING) != 1.0:
            raise _contradiction(entries, keys.SCALING, "leaves the weights as they are")
        return 1.0
    factor = entries.number(keys.SCALING)
    if factor is None:
        return 1.0
    if factor <= 0:
        raise entries.error(f"{_name(entries, keys.SCALING)} is {factor:g}, expected a number greater than 0")
    return factor


def _groups(entries: ConfigKeys, family: Family) -> tuple[int | None, int | None]:
    """Return (number of groups, groups per token), or (None, None) if there is only one group."""
    method = entries.text(keys.TOPK_METHOD)
    grouped = keys.GROUPS[0] in family.reads
    if method is not None:
        if method not in _METHODS:
            raise entries.error(f"topk_method is {method!r}, expected {', '.join(_METHODS)}")
        if keys.TOPK_METHOD[0] in family.reads:
            grouped = _METHODS[method]
        elif (method == "noaux_tc") is not family.correction_bias:
            bias = "a correction bias" if family.correction_bias else "no correction bias"
            raise _contradiction(entries, keys.TOPK_METHOD, f"chooses experts with {bias}")
    if keys.GROUPS[0] not in family.reads:
        stated = entries.stated(keys.GROUPS)
        if stated is not None and stated[1] is not False and (entries.optional_integer(keys.GROUPS) or 1) > 1:
            raise _contradiction(entries, keys.GROUPS, "does not support expert groups")
        return None, None
    groups = entries.optional_integer(keys.GROUPS) if grouped else None
    if groups is None or groups == 1:
        return None, None
    return groups, entries.integer(keys.TOP_GROUPS)[1]


def _has_correction_bias(entries: ConfigKeys, family: Family, corrects: bool) -> bool:
    if keys.BIAS_SWITCH[0] in family.reads:
        # If config.json lacks the entry, routing uses a correction bias if the tensor exists.
        switch = entries.boolean(keys.BIAS_SWITCH)
        return family.correction_bias and (corrects if switch is None else switch)
    return _boolean(entries, family, keys.BIAS_SWITCH, family.correction_bias)


def _name(entries: ConfigKeys, names: Sequence[str]) -> str:
    found = entries.find(names)
    return names[0] if found is None else found[0]


def _contradiction(entries: ConfigKeys, names: Sequence[str], code: str) -> CheckpointError:
    found = entries.find(names)
    key, value = found if found is not None else (names[0], None)
    return entries.error(f"{key} is {value!r}, but the code of model_type {entries.model_type!r} {code}: {BY_HAND}")
