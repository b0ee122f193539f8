"""Routing against loops over tokens with Python floats."""

from __future__ import annotations

import math

import pytest
import torch
from moe_core.errors import ConfigError, TensorError
from moe_core.spec.routing import RoutingConfig, RoutingMethodType, route

R = RoutingMethodType
NAN, INF = math.nan, math.inf


def logistic(x):
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def softplus(x):
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def softmax(values):
    powers = [math.exp(v - max(values)) for v in values]
    return [p / sum(powers) for p in powers]


def best(values, count):
    """Indices of the largest values, the lower index of equals."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]


def route_token(logits, top_k, config, bias):
    """(weights, ids) of one token whose logits are numbers, straight from the definitions."""
    score_one = {"sigmoid": logistic, "sqrtsoftplus": lambda v: math.sqrt(softplus(v)), "none": float}
    if config.scoring_func == "softmax":
        scores = softmax(logits)
    else:
        scores = [score_one[config.scoring_func](v) for v in logits]
    choice = list(logits) if bias is None else [s + b for s, b in zip(scores, bias, strict=True)]
    allowed = range(len(logits))
    if config.is_grouped:
        size = len(logits) // config.num_expert_group
        groups = [choice[g * size : (g + 1) * size] for g in range(config.num_expert_group)]
        rank = [max(g) if bias is None else sum(sorted(g)[-2:]) for g in groups]
        kept = best(rank, config.topk_group)
        allowed = [e for e in allowed if e // size in kept]
    ids = [allowed[i] for i in best([choice[e] for e in allowed], top_k)]
    if config.score_selected_only and config.scoring_func == "softmax":
        weights = softmax([logits[e] for e in ids])
    else:
        weights = [scores[e] for e in ids]
        if config.renormalize:
            weights = [w / (sum(weights) + 1e-20) for w in weights]
    return [w * config.routed_scaling_factor for w in weights], ids


METHODS = [m for m in R if m not in (R.Custom, R.Unspecified, R.Simulated)]
CONFIGS = {m.name: (RoutingConfig.from_method(m), 32, 1 if m is R.Llama4 else 4) for m in METHODS if m != R.DeepSeekV3}
CONFIGS |= {
    "DeepSeekV3": (
        RoutingConfig.from_method("DeepSeekV3", num_expert_group=8, topk_group=4, routed_scaling_factor=2.5),
        64,
        8,
    ),
    "DeepSeek-V2": (
        RoutingConfig(renormalize=False, num_expert_group=8, topk_group=3, routed_scaling_factor=16.0),
        160,
        6,
    ),
    "groups of one": (RoutingConfig.from_method(R.DeepSeekV3, num_expert_group=12, topk_group=7), 12, 5),
    "odd groups": (RoutingConfig.from_method(R.DeepSeekV3, num_expert_group=3, topk_group=2), 21, 14),
    "softmax and bias": (RoutingConfig(has_correction_bias=True), 60, 4),
    "sigmoid groups without bias": (RoutingConfig("sigmoid", num_expert_group=4, topk_group=1), 20, 5),
    "one expert": (RoutingConfig.from_method(R.RenormalizeNaive), 1, 1),
    "every expert": (RoutingConfig.from_method(R.MiniMax2), 7, 7),
}
# 20 roundings of at most 2^-24 (exp: two units) in any chain from logit to weight; logits up to 16 don't amplify,
# because they are exact
RELATIVE = 24 * 2.0**-24


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_against_loops(name, dtype):
    config, experts, top_k = CONFIGS[name]
    generator = torch.Generator().manual_seed(len(name))
    logits = (torch.randn(40, experts, generator=generator) * 4).to(dtype)
    bias = torch.randn(experts, generator=generator) if config.has_correction_bias else None
    weights, ids = route(logits, top_k=top_k, config=config, correction_bias=bias)
    assert weights.dtype is torch.float32
    assert ids.dtype is torch.int32
    for m in range(logits.shape[0]):
        want_weights, want_ids = route_token(logits[m].tolist(), top_k, config, None if bias is None else bias.tolist())
        assert ids[m].tolist() == want_ids
        assert weights[m].tolist() == pytest.approx(want_weights, rel=RELATIVE)


def test_renormalize_and_its_naive_form_agree():
    logits = torch.randn(9, 33)
    one, two = (
        route(logits, top_k=5, config=RoutingConfig.from_method(m)) for m in (R.Renormalize, R.RenormalizeNaive)
    )
    assert torch.equal(one[1], two[1])
    torch.testing.assert_close(one[0], two[0], rtol=RELATIVE, atol=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_ties_go_to_the_lower_id(name):
    config, experts, top_k = CONFIGS[name]
    bias = torch.zeros(experts) if config.has_correction_bias else None
    _, ids = route(torch.zeros(2, experts), top_k=top_k, config=config, correction_bias=bias)
    assert ids.tolist() == [list(range(top_k))] * 2
    # minus zero is zero
    _, ids = route(-torch.zeros(1, experts), top_k=top_k, config=config, correction_bias=bias)
    assert ids.tolist() == [list(range(top_k))]


@pytest.mark.parametrize("name", CONFIGS)
def test_any_logits_give_distinct_ids_in_range(name):
    config, experts, top_k = CONFIGS[name]
    generator = torch.Generator().manual_seed(1)
    special = torch.tensor([NAN, INF, -INF, 0.0, 1.0, -300.0, 300.0, -NAN])
    logits = special[torch.randint(0, 8, (200, experts), generator=generator)]
    logits[0], logits[1], logits[2] = NAN, -INF, INF
    bias = None
    if config.has_correction_bias:
        bias = special[torch.randint(0, 8, (experts,), generator=generator)]
    _, ids = route(logits, top_k=top_k, config=config, correction_bias=bias)
    assert ids.min() >= 0
    assert ids.max() < experts
    ordered = ids.sort(dim=1).values
    assert (ordered[:, 1:] > ordered[:, :-1]).all()


@pytest.mark.parametrize("method", ["Default", "Renormalize", "RenormalizeNaive", "Sigmoid", "SigmoidRenorm", "TopK"])
def test_nan_counts_as_minus_infinity(method):
    logits = torch.tensor([[NAN, 1.0, 2.0, NAN], [1.0, -INF, -INF, 0.5]])
    config = RoutingConfig.from_method(method)
    weights, ids = route(logits, top_k=3, config=config)
    assert ids.tolist() == [[2, 1, 0], [0, 3, 1]]
    assert weights[:, 2].tolist() == [0.0, 0.0]
    assert weights.isfinite().all()
    clean, _ = route(logits.nan_to_num(nan=-INF, posinf=INF, neginf=-INF), top_k=3, config=config)
    assert torch.equal(clean, weights)


def test_a_row_without_numbers():
    logits = torch.full((1, 4), NAN)
    weights, ids = route(logits, top_k=2, config=RoutingConfig.from_method(R.Default))
    assert ids.tolist() == [[0, 1]]
    assert weights.tolist() == [[0.25, 0.25]]
    weights, _ = route(logits, top_k=2, config=RoutingConfig.from_method(R.SigmoidRenorm))
    assert weights.tolist() == [[0.0, 0.0]]


def test_a_disabled_expert_is_not_revived_by_its_bias():
    config = RoutingConfig.from_method(R.MiniMax2)
    logits, bias = torch.tensor([[-INF, -50.0, -50.0]]), torch.tensor([100.0, 0.0, 0.0])
    _, ids = route(logits, top_k=2, config=config, correction_bias=bias)
    assert ids.tolist() == [[1, 2]]


def test_the_bias_moves_the_choice_and_not_the_weight():
    config = RoutingConfig.from_method(R.MiniMax2)
    weights, ids = route(
        torch.tensor([[3.0, 2.0, -1.0]]), top_k=2, config=config, correction_bias=torch.tensor([0.0, 0.0, 9.0])
    )
    assert ids.tolist() == [[2, 0]]
    total = logistic(-1) + logistic(3)
    assert weights[0].tolist() == pytest.approx([logistic(-1) / total, logistic(3) / total], rel=RELATIVE)


def test_saturated_scores_are_still_ordered():
    # both sigmoids are 1.0 in float32
    _, ids = route(torch.tensor([[30.0, 40.0]]), top_k=1, config=RoutingConfig.from_method(R.Sigmoid))
    assert ids.tolist() == [[1]]


def test_no_tokens_and_strides():
    config = RoutingConfig.from_method(R.Renormalize)
    weights, ids = route(torch.empty(0, 8), top_k=3, config=config)
    assert weights.shape == ids.shape == (0, 3)
    logits = torch.randn(8, 5)
    assert torch.equal(
        route(logits.T, top_k=3, config=config)[1], route(logits.T.contiguous(), top_k=3, config=config)[1]
    )


def test_custom():
    def first(router_logits, *, top_k, renormalize):
        assert renormalize is True
        ids = torch.arange(top_k).expand(router_logits.shape[0], top_k)
        return torch.ones(router_logits.shape[0], top_k, dtype=torch.bfloat16), ids

    config = RoutingConfig.from_method(R.Custom, custom=first, routed_scaling_factor=2.0)
    assert config.method is R.Custom
    weights, ids = route(torch.randn(3, 8), top_k=2, config=config)
    assert weights.dtype is torch.float32
    assert ids.dtype is torch.int32
    assert weights.tolist() == [[2.0, 2.0]] * 3
    assert ids.tolist() == [[0, 1]] * 3
    with pytest.raises(ConfigError, match="needs custom="):
        RoutingConfig.from_method("Custom")
    for wrong, message in (
        (lambda *_, **__: None, "NoneType"),
        (lambda *_, **__: (torch.ones(3, 3), torch.ones(3, 2).int()), r"weights .*\[3, 3\]"),
        (lambda *_, **__: (torch.ones(3, 2), torch.ones(3, 2)), "ids .*torch.float32"),
    ):
        with pytest.raises(TensorError, match=message):
            route(torch.randn(3, 8), top_k=2, config=RoutingConfig(custom=wrong))


def test_custom_ids_out_of_range_are_no_expert():
    ids = torch.tensor([[2**32 + 1, 7], [-1, 8], [-(2**32), 2**31], [0, -(2**63)]])
    config = RoutingConfig(custom=lambda *_, **__: (torch.ones(4, 2), ids))
    assert route(torch.randn(4, 8), top_k=2, config=config)[1].tolist() == [[-1, 7], [-1, -1], [-1, -1], [0, -1]]


@pytest.mark.parametrize("method", METHODS)
def test_methods_keep_their_name(method):
    groups = {"num_expert_group": 4, "topk_group": 2} if method is R.DeepSeekV3 else {}
    config = RoutingConfig.from_method(method, **groups)
    assert config.method is method
    assert RoutingConfig.from_method(method.name.lower(), **groups) == config
    assert eval(repr(config)) == config
    assert hash(config) == hash(RoutingConfig.from_method(method, **groups))


def test_combinations_without_a_name_are_unspecified():
    # a kernel that claims Default must not be handed grouped softmax
    assert RoutingConfig(num_expert_group=8, topk_group=3).method is R.Unspecified
    assert RoutingConfig(has_correction_bias=True).method is R.Unspecified
    assert RoutingConfig("sigmoid", num_expert_group=8, topk_group=3).method is R.Unspecified
    # one group is no group
    assert RoutingConfig("sigmoid", num_expert_group=1, topk_group=1, has_correction_bias=True).method is R.MiniMax2


def test_values_are_those_of_the_field():
    assert {m.name: int(m) for m in R} == {
        "Default": 0,
        "Renormalize": 1,
        "DeepSeekV3": 2,
        "Llama4": 3,
        "RenormalizeNaive": 4,
        "TopK": 5,
        "SigmoidRenorm": 6,
        "MiniMax2": 7,
        "Sigmoid": 8,
        "Unspecified": 9,
        "DeepseekV4": 100,
        "Custom": 101,
        "Simulated": 102,
    }


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"scoring_func": "tanh"}, "scoring_func 'tanh'"),
        ({"scoring_func": "none"}, "renormal"),
        ({"score_selected_only": True, "has_correction_bias": True}, "correction bias|correction_bias"),
        ({"num_expert_group": 4}, "num_expert_group 4 .*topk_group"),
        ({"num_expert_group": 4, "topk_group": 5}, "num_expert_group 4.*5"),
        ({"num_expert_group": 4, "topk_group": 0}, "got 0"),
    ],
)
def test_contradictions(keywords, message):
    with pytest.raises(ConfigError, match=message):
        RoutingConfig(**keywords)


@pytest.mark.parametrize(
    ("method", "keywords", "message"),
    [
        ("Unspecified", {}, "Unspecified"),
        ("Simulated", {}, "Simulated"),
        ("Magic", {}, "'Magic'"),
        ("DeepSeekV3", {}, "num_expert_group.* topk_group"),
        ("Default", {"num_expert_group": 4, "topk_group": 2}, r"Default .*group"),
    ],
)
def test_refused_methods(method, keywords, message):
    with pytest.raises(ConfigError, match=message):
        RoutingConfig.from_method(method, **keywords)


def test_wrong_calls():
    plain = RoutingConfig()
    groups = RoutingConfig(num_expert_group=4, topk_group=1)
    logits = torch.randn(2, 8)
    for config, top_k, x, message in (
        (plain, 9, logits, "top_k .*9"),
        (plain, 0, logits, "got 0"),
        (groups, 1, torch.randn(2, 10), "num_expert_group 4"),
        (groups, 3, logits, "top_k 3 .*topk_group"),
        (RoutingConfig.from_method(R.Llama4), 2, logits, "Llama4"),
    ):
        with pytest.raises(ConfigError, match=message):
            route(x, top_k=top_k, config=config)
    with pytest.raises(TensorError, match=r"router_logits .*\[8\]"):
        route(logits[0], top_k=1, config=plain)
    with pytest.raises(TensorError, match=r"dtype torch\.int64"):
        route(logits.long(), top_k=1, config=plain)
    with pytest.raises(TensorError, match="has_correction_bias .*False"):
        route(logits, top_k=1, config=plain, correction_bias=torch.zeros(8))
    biased = RoutingConfig.from_method(R.MiniMax2)
    with pytest.raises(TensorError, match="has_correction_bias .*True"):
        route(logits, top_k=1, config=biased)
    with pytest.raises(TensorError, match=r"correction_bias .*\[7\]"):
        route(logits, top_k=1, config=biased, correction_bias=torch.zeros(7))


def test_a_config_by_its_text() -> None:
    assert RoutingConfig.parse("softmax") == RoutingConfig(renormalize=False)
    text = "sigmoid, renormalize,has_correction_bias,num_expert_group=8,topk_group=4,routed_scaling_factor=2.5"
    assert RoutingConfig.parse(text) == RoutingConfig("sigmoid", True, False, 8, 4, 2.5, has_correction_bias=True)
    assert RoutingConfig.parse("softmax,renormalize,score_selected_only").score_selected_only
    assert RoutingConfig.parse("Renormalize") == RoutingConfig.from_method("Renormalize")
    text = "deepseekv3,num_expert_group=8,topk_group=4"
    assert RoutingConfig.parse(text) == RoutingConfig("sigmoid", True, False, 8, 4, has_correction_bias=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("argmax", "'argmax'"),
        ("", "routing ''"),
        ("Renormalize,renormalize", "'renormalize'.*num_expert_group"),
        ("DeepSeekV3", "num_expert_group.* topk_group"),
        ("softmax,top_k=3", "'top_k=3'"),
        ("softmax,renormalize=1", "'renormalize=1'"),
        ("softmax,topk_group", "'topk_group'"),
        ("softmax,topk_group=two", "topk_group .*'two'"),
        ("softmax,custom=f", "has 'custom=f'"),
        ("softmax,num_expert_group=4", "num_expert_group 4 .*topk_group"),
    ],
)
def test_text_that_names_no_config(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RoutingConfig.parse(text)
