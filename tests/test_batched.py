"""The batched format in every backend that runs here."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from moe_core import DeviceInfo, FusedMoEActivationFormat, FusedMoEConfig, FusedMoEExperts, registry
from moe_core.testing.cases import Case, expand_keys
from moe_core.testing.harness import PRETENDED, Place, make_kernel, make_problem

CONFIG = FusedMoEConfig(
    num_experts=4,
    top_k=3,
    hidden_size=256,
    intermediate_size=128,
    activation_format=FusedMoEActivationFormat.BATCHED,
    max_num_tokens=4,
)
HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TARGETS = [DeviceInfo.current(HERE)] + [DeviceInfo.parse(name) for name in PRETENDED if HERE.type == "cpu"]


def batched_experts() -> list[Any]:
    """Every class with the first keys that it takes here, or in Triton's interpreter as if on some GPU."""
    found = []
    for scheme in registry().scheme_names():
        for backend in registry().oracle(scheme).table():
            for experts in backend.load():
                fitting = (
                    (experts, Case("output", CONFIG, *keys, tokens=4), target)
                    for target in TARGETS
                    for keys in expand_keys(experts.claims)
                    if experts.is_supported_config(CONFIG, *keys, device=target)[0]
                )
                found += [pytest.param(*case, id=experts.__name__) for case in itertools.islice(fitting, 1)]
    return found


@pytest.mark.parametrize(("experts", "case", "target"), batched_experts())
def test_an_expert_chosen_twice_counts_twice(experts: type[FusedMoEExperts], case: Case, target: DeviceInfo) -> None:
    problem = make_problem(case, HERE)
    kernel = make_kernel(experts, problem, Place(HERE, target))
    # a row for each pair would be 9 of one expert, and there is room for 4
    twice = torch.tensor([[1, 1, 2], [2, 1, 1], [1, 1, 1], [1, 3, 1]], dtype=torch.int32, device=HERE)
    once = torch.tensor([[1, -1, 2], [2, 1, -1], [1, -1, -1], [1, 3, -1]], dtype=torch.int32, device=HERE)
    # sums of these weights, and of products with numbers of the output's dtype, are exact in float32
    weights = torch.tensor([[0.5, 0.25, 1], [1, 0.5, 0.25], [0.5, 0.25, 0.25], [0.25, 1, 0.5]], device=HERE)
    summed = torch.tensor([[0.75, 0, 1], [1, 0.75, 0], [1, 0, 0], [0.75, 1, 0]], device=HERE)
    found = kernel.apply(problem.inputs.x, topk_weights=weights, topk_ids=twice)
    expected = kernel.apply(problem.inputs.x, topk_weights=summed, topk_ids=once)
    assert bool(expected.any())
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
