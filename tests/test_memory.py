"""What is told of a layer's memory from one expert is what its conversion takes, for every backend of every scheme."""

from __future__ import annotations

from dataclasses import replace

import pytest
from moe_core import TRITON, Candidate, DeviceInfo, FusedMoEConfig, Selection, SelectionReport, registry
from moe_core.interface.claims import expand_key
from moe_core.interface.experts import FusedMoEExperts
from moe_core.selection.memory import _laid_out, example_weights, layer_memory
from moe_core.spec.quant_key import QuantKey, key_name

EXPERTS = [
    (scheme, backend.name, experts)
    for scheme in registry().scheme_names()
    for backend in registry().oracle(scheme).table()
    for experts in backend.load()
]


def selected(
    scheme: str, name: str, experts: type[FusedMoEExperts], weight: QuantKey | None, activation: QuantKey | None
) -> Selection:
    """The class for a small layer on a device that it claims, whatever is installed."""
    claims = experts.claims
    config = FusedMoEConfig(
        num_experts=8,
        num_local_experts=3,
        top_k=2,
        hidden_size=512,
        intermediate_size=256,
        activation=min(claims.activations, key=lambda a: (a.value != "silu", a.value)),
        activation_format=min(claims.formats),
        max_num_tokens=64,
        has_bias=claims.bias,
    )
    known = [DeviceInfo.parse(arch) for arch in ("sm90", "sm100", "sm80", "gfx950", "cpu")]
    device = next(d for d in known if any(r.reason_against(d) is None for r in claims.devices))
    chosen = Candidate(name, experts, ())
    return Selection(
        name, experts, SelectionReport(scheme, device, config, weight, activation, name, (chosen,), chosen)
    )


@pytest.mark.parametrize(("scheme", "name", "experts"), EXPERTS, ids=[f"{s}-{e.__name__}" for s, _, e in EXPERTS])
def test_one_expert_tells_of_all(scheme: str, name: str, experts: type[FusedMoEExperts]) -> None:
    kinds = {}
    for claim, other in experts.claims.keys:
        for weight in expand_key(claim):
            for activation in expand_key(other):
                kind = (
                    weight and (weight.dtype, weight.permuted, weight.pre_scaled),
                    activation and activation.is_static,
                )
                kinds.setdefault(kind, (weight, activation))
    for weight, activation in list(kinds.values())[:6]:
        selection = selected(scheme, name, experts, weight, activation)
        given = example_weights(selection.config, weight, activation)
        given.validate(selection.config)
        told = layer_memory(selection, 64)
        if not told.exact:
            # the library that lays them out is not here
            assert experts.claims.requires, (key_name(weight), key_name(activation))
            assert abs(told.weights - given.nbytes) < 256
            continue
        weights, peak = _laid_out(selection, given)
        # a few values of the whole layer stand beside those of each expert
        assert abs(told.weights - weights) < 256, (key_name(weight), key_name(activation))
        assert abs(told.load_peak - peak) < 512
        if told.workspace is None:
            assert set(experts.claims.requires) - {TRITON}
        else:
            assert told.workspace > 0 or not experts.claims.cuda_graph


def test_a_layer_larger_than_any_memory_is_not_laid_out() -> None:
    config = FusedMoEConfig(num_experts=2**20, top_k=1, hidden_size=2**24, intermediate_size=2**24)
    oracle = registry().oracle("fp8")
    key = oracle.table()[-1].load()[0].claims.keys[0]
    weight, activation = expand_key(key[0])[0], expand_key(key[1])[0]
    selection = oracle.select(config, weight_key=weight, activation_key=activation, device="cpu")
    told = layer_memory(selection, 2**31 - 1)
    assert not told.exact
    assert told.weights > 2**20 * 3 * 2**48
    small = replace(config, num_experts=2, num_local_experts=2, hidden_size=512, intermediate_size=512)
    selection = oracle.select(small, weight_key=weight, activation_key=activation, device="cpu")
    assert layer_memory(selection, 1).exact
