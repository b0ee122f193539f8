"""The table of families against transformers: every MoE family that it has, built tiny and random.

One layer each: what ``save_pretrained`` writes is read here, and chosen experts, weights and output are compared with
what the module itself computes in float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core.checkpoint import Checkpoint, LayerModel, find_layer, read_model
from moe_core.checkpoint.config import keys as config_keys
from moe_core.checkpoint.config.families import family_of, refusal_of
from moe_core.checkpoint.experts.unquantized import UnquantizedLayout
from moe_core.reference.fused_moe import fused_moe_reference
from moe_core.spec.routing import route
from moe_core.spec.weights import MoEWeights
from torch import Tensor, nn

pytest.importorskip("transformers", reason="the nox session `families` installs it")

from moe_core_transformers import TOP_K, E, families, first, moe_blocks, omni_model, tiny_model
from transformers import PreTrainedModel

TOKENS = 37
KNOWN = sorted(name for name in families() if family_of(name) is not None)
ROUTED = [name for name in KNOWN if family_of(name).per_call is None]  # type: ignore[union-attr]

#: entries of config.json that change routing or activation
ENTRIES = (
    config_keys.SCORING,
    config_keys.RENORMALIZE,
    config_keys.SCALING,
    config_keys.TOPK_METHOD,
    config_keys.GROUPS,
    config_keys.TOP_GROUPS,
    config_keys.BIAS_SWITCH,
    config_keys.SWIGLU_LIMIT,
    config_keys.SWIGLU_ALPHA,
)


#: families whose configuration classes had no such entries at first, but modules with the same numbers
ENTRIES_OF_LATER_VERSIONS = ("gpt_oss", "openai_privacy_filter")
#: families whose hidden_act may be nothing else
ONE_ACTIVATION = ("qwen4_exp_text",)


def test_every_family_is_in_a_table() -> None:
    """A family that a release of transformers adds belongs into FAMILIES, or into REFUSED with the reason."""
    assert [name for name in families() if family_of(name) is None and refusal_of(name) is None] == []


@pytest.mark.parametrize("model_type", KNOWN)
def test_defaults_are_those_of_the_configuration_class(model_type: str) -> None:
    family, own = family_of(model_type), families()[model_type]().to_dict()
    assert family is not None
    for names in ENTRIES:
        found = {own[name] for name in names if name in own and not isinstance(own[name], list)}
        if names[0] in family.reads:
            assert found == {family.reads[names[0]]} or (not found and model_type in ENTRIES_OF_LATER_VERSIONS)
    acts = {own[name] for name in config_keys.ACTIVATION if name in own}
    if family.activation is None:
        assert acts == {family.hidden_act}


def variants() -> list[tuple[str, str]]:
    """(model_type, variant): the class's defaults; the same left out of config.json; other values."""
    found = []
    for model_type in ROUTED:
        family = family_of(model_type)
        assert family is not None
        found += [(model_type, kind) for kind in ("stated", "left out", "other")]
    return found


OTHER = {
    "norm_topk_prob": lambda default: not default,
    "routed_scaling_factor": lambda default: default * 1.5,
    "n_group": lambda default: 4,
    "topk_group": lambda default: 2,
    "topk_method": lambda default: "group_limited_greedy",
    "scoring_func": lambda default: "sigmoid",
    "use_expert_bias": lambda default: not default,
    "swiglu_limit": lambda default: 0.75,
    "swiglu_alpha": lambda default: 1.25,
}


def other_entries(model_type: str) -> dict[str, Any]:
    """Entries that the family reads, under its own names, with values that are not its defaults."""
    family, own = family_of(model_type), families()[model_type]().to_dict()
    assert family is not None
    entries = {}
    for names in ENTRIES:
        name = next((name for name in names if name in own), None)
        if name is not None and names[0] in family.reads:
            entries[name] = OTHER[names[0]](family.reads[names[0]])
    if family.activation is None and model_type not in ONE_ACTIVATION:
        name = next(name for name in config_keys.ACTIVATION if name in own)
        entries[name] = "gelu_pytorch_tanh" if own[name] == "silu" else "silu"
    if "swiglu_limits" in entries:
        entries["swiglu_limits"] = [entries["swiglu_limits"]] * 2
    return entries


@pytest.mark.parametrize(("model_type", "variant"), variants())
def test_a_layer_routes_and_computes_as_its_module(tmp_path: Path, model_type: str, variant: str) -> None:
    layer = Layer(tmp_path, tiny_model(model_type, **(other_entries(model_type) if variant == "other" else {})))
    if variant == "left out":
        layer.leave_out({name for names in (*ENTRIES, config_keys.ACTIVATION) for name in names})
    compare(layer)


@pytest.mark.parametrize("stack", [None, "thinker", "talker"])
def test_a_model_with_two_stacks_of_layers(tmp_path: Path, stack: str | None) -> None:
    model = omni_model()
    thinker, talker = (next(moe_blocks(model, name))[1].gate.weight for name in ("thinker", "talker"))
    layer = Layer(tmp_path, model, stack)
    found = layer.read()[0].router_weight
    assert found is not None
    assert torch.equal(found, talker if stack == "talker" else thinker)
    compare(layer)


def test_hash_layers_are_left_to_each_call(tmp_path: Path) -> None:
    layer = Layer(tmp_path, tiny_model("deepseek_v4", mlp_layer_types=["hash_moe", "moe"]))
    model, weights = layer.read()
    assert model.config.routing is None
    assert "by the ids of the tokens" in str(model.routing_reason)
    x, tokens = layer.tokens(model), torch.arange(TOKENS) % 64
    gate = layer.block.gate
    gate.tid2eid.copy_(torch.stack([torch.randperm(E)[:TOP_K] for _ in range(64)]))
    with torch.no_grad():
        logits, scores, ids = gate(x, tokens)
        output = layer.block.experts(x, ids, scores)
    assert model.router_weight is not None
    torch.testing.assert_close(x @ model.router_weight.T, logits)
    want = fused_moe_reference(x, weights, model.config, topk_weights=scores, topk_ids=ids).float()
    torch.testing.assert_close(output, want, rtol=0, atol=1e-6 * float(want.abs().max()))
    # config.json of the original model says it in another way, or leaves it to the tensor
    for entries in ({"num_hash_layers": 1}, {"num_hash_layers": 0}, {}):
        layer.leave_out({"mlp_layer_types", "num_hash_layers"})
        layer.state(entries)
        assert layer.read()[0].config.routing is None


@pytest.mark.parametrize("model_type", sorted(set(KNOWN) - set(ROUTED)))
def test_experts_compute_as_their_module_where_each_call_routes(tmp_path: Path, model_type: str) -> None:
    layer = Layer(tmp_path, tiny_model(model_type))
    model, weights = layer.read()
    assert model.config.routing is None
    assert model.routing_reason is not None
    x = layer.tokens(model)
    generator = torch.Generator().manual_seed(1)
    ids = torch.rand(TOKENS, E, generator=generator).argsort(dim=1)[:, : model.config.top_k]
    scores = torch.rand(ids.shape, generator=generator)
    with torch.no_grad():
        output = layer.block.experts(x, ids, scores)
    want = fused_moe_reference(x, weights, model.config, topk_weights=scores, topk_ids=ids).float()
    torch.testing.assert_close(output, want, rtol=0, atol=1e-6 * float(want.abs().max()))


def _scaling(model: LayerModel) -> float:
    assert model.config.routing is not None
    return model.config.routing.routed_scaling_factor


def compare(layer: Layer) -> None:
    """Chosen experts, weights and output of random tokens."""
    model, weights = layer.read()
    x = layer.tokens(model)
    seen, output = layer.run(x)

    routing = model.config.routing
    assert routing is not None, model.routing_reason
    assert model.router_weight is not None
    logits = x @ model.router_weight.float().T
    if model.router_bias is not None:
        logits = logits + model.router_bias
    scores, ids = route(logits, top_k=model.config.top_k, config=routing, correction_bias=model.correction_bias)
    if seen is not None:
        theirs, order = seen[0].sort(dim=1)
        ours, mine = ids.long().sort(dim=1)
        assert torch.equal(ours, theirs)
        expected = seen[1].gather(1, order)
        if layer.model_type in SCALED_AFTER:
            expected = expected * SCALED_AFTER[layer.model_type](model)
        torch.testing.assert_close(
            scores.gather(1, mine), expected, rtol=RENORM_EPSILON.get(layer.model_type, 1e-6), atol=0
        )
    want = fused_moe_reference(x, weights, model.config, topk_weights=scores, topk_ids=ids).float()
    # K + N + k products are summed in float32, whose roundings mostly cancel
    tolerance = max(1e-6, RENORM_EPSILON.get(layer.model_type, 0.0))
    torch.testing.assert_close(output, want, rtol=0, atol=tolerance * float(want.abs().max()))


#: the module scales what its experts return, not the weights
SCALED_AFTER: dict[str, Callable[[LayerModel], float]] = {
    **dict.fromkeys(("beam", "laguna", "minimax_m3_vl_text", "step3p5"), _scaling),
    "openai_privacy_filter": lambda model: model.config.top_k,
}
#: what the module adds to the sum that it divides by, over sums of at least 0.2: elsewhere a few roundings of float32
RENORM_EPSILON = {"lfm2_moe": 1e-6 / 0.2}
#: the module normalizes the experts' sum
NORMALISED_AFTER = {"axk1"}


class Layer:
    """The first MoE layer of a tiny model: its module, and the folder that ``save_pretrained`` wrote."""

    def __init__(self, folder: Path, model: PreTrainedModel, stack: str | None = None) -> None:
        self.folder, self.model_type, self.stack = folder, model.config.model_type, stack
        self.index, self.block = next(moe_blocks(model, stack or ""))
        model.save_pretrained(folder)

    def leave_out(self, names: set[str]) -> None:
        """Removes entries of config.json."""
        path = self.folder / "config.json"
        kept = {name: value for name, value in json.loads(path.read_text()).items() if name not in names}
        path.write_text(json.dumps(kept))

    def state(self, entries: dict[str, Any]) -> None:
        """Adds entries to config.json."""
        path = self.folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))

    def read(self) -> tuple[LayerModel, MoEWeights]:
        layer = find_layer(Checkpoint.open(self.folder), self.index, self.stack)
        model = read_model(layer, dtype=torch.float32)
        return model, UnquantizedLayout(layer, None, None).load(model.config, experts=range(E))

    def tokens(self, model: LayerModel) -> Tensor:
        return torch.randn(TOKENS, model.config.hidden_size, generator=torch.Generator().manual_seed(2))

    def run(self, x: Tensor) -> tuple[tuple[Tensor, Tensor] | None, Tensor]:
        """((ids, weights) that the experts are given, the routed experts' sum); shared experts' weights are 0."""
        seen: list[tuple[Any, ...]] = []
        experts = self.block.experts
        assert isinstance(experts, nn.Module)
        handle = experts.register_forward_hook(lambda module, args, out: seen.append((*args, out)))
        with torch.no_grad():
            output = first(self.block(x[None])).reshape(TOKENS, -1)
        handle.remove()
        if len(seen[0]) != 4:
            return None, output
        _, ids, weights, out = seen[0]
        return (ids, weights), out if self.model_type in NORMALISED_AFTER else output
