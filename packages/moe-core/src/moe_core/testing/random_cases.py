"""Layers of the conformance kit that are drawn at random from what a class claims: ``--moe-budget random:30:7``.

The covering cases of :mod:`moe_core.testing.cases` hold few sizes, which somebody chose.  Here sizes, numbers of
experts and tokens, the skew of the routing and every claimed value are drawn, so that shapes nobody thought of occur.
The n-th case of a class follows from the seed and n alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moe_core.errors import ConfigError
from moe_core.interface.claims import Claims
from moe_core.interface.experts import FusedMoEExperts
from moe_core.spec.config import whole_number
from moe_core.spec.device import DeviceInfo
from moe_core.spec.environment import Environment
from moe_core.testing.cases import BUDGETS, Case, KeyPair, activations_of, case_of, expand_keys
from moe_core.testing.covering import Row
from moe_core.testing.data import ROUTINGS, SKEWED

#: draws of one case until a class must support one of them
TRIES = 400


@dataclass(frozen=True)
class RandomBudget:
    """How many layers to draw, and the seed of the first one."""

    count: int
    seed: int = 0

    @staticmethod
    def parse(text: str) -> RandomBudget | None:
        """Of "random:COUNT" or "random:COUNT:SEED"; None for another budget's name.  ConfigError for anything else."""
        name, *numbers = text.split(":")
        if text in BUDGETS:
            return None
        if name != "random" or not 1 <= len(numbers) <= 2 or not all(n.isascii() and n.isdigit() for n in numbers):
            raise ConfigError(f"the budget is {', '.join(BUDGETS)} or random:COUNT[:SEED], got {text!r}")
        count, seed = (*map(int, numbers), 0)[:2]
        return RandomBudget(whole_number("the number of random cases", count), seed)


@dataclass(frozen=True)
class Largest:
    """The largest layers that are drawn: sizes, tokens, experts, elements of all weights, rows times columns of h."""

    size: int
    tokens: int
    experts: int
    weights: int
    hidden: int


#: on a GPU many rows per expert, and layers whose weights take the CPU under a second to draw
ON_GPU = Largest(size=3000, tokens=4096, experts=160, weights=1 << 24, hidden=1 << 24)
#: in Triton's interpreter, or in plain torch on the CPU
ON_CPU = Largest(size=300, tokens=64, experts=16, weights=1 << 19, hidden=1 << 14)


def random_cases(
    experts: type[FusedMoEExperts], budget: RandomBudget, *, target: DeviceInfo, large: bool = False
) -> list[Case]:
    """``budget.count`` cases of the check "values" on the device ``target``; ``large``: sizes for a GPU.

    No case where a library is missing that the class needs.  Raises ConfigError where the class refuses everything that
    is drawn from its own claims.
    """
    if any(map(Environment.current().reason_against, experts.claims.requires)):
        return []
    found = []
    keys = expand_keys(experts.claims)
    for number in range(budget.count):
        # a text, so that seed 1 and case 12 are not seed 11 and case 2
        generator = random.Random(f"{experts.__qualname__} {budget.seed} {number}")
        found.append(_drawn(experts, keys, target, ON_GPU if large else ON_CPU, generator))
    return found


def _drawn(
    experts: type[FusedMoEExperts],
    keys: Sequence[KeyPair],
    target: DeviceInfo,
    largest: Largest,
    generator: random.Random,
) -> Case:
    """One case that the class supports."""
    environment, why = Environment.current(), "none was possible"
    for _ in range(TRIES):
        case = case_of(_row(experts.claims, keys, largest, generator))
        if case is None:
            continue
        reasons = experts.unsupported_reasons(case.config, case.weight_key, case.activation_key, target, environment)
        if not reasons:
            return case
        why = reasons[0]
    raise ConfigError(f"{experts.__name__} supports none of {TRIES} layers drawn from its claims; the last: {why}")


def _row(claims: Claims, keys: Sequence[KeyPair], largest: Largest, generator: random.Random) -> Row:
    """A value of every factor of a case."""
    count = _log_uniform(1, min(largest.experts, claims.max_experts or largest.experts), generator)
    top_k = _log_uniform(1, min(count, 10, claims.max_top_k or 10), generator)
    matrices = largest.weights // count // 3
    hidden = _size(min(largest.size, matrices), claims.hidden_multiple, generator)
    inter = _size(min(largest.size, max(1, matrices // hidden)), claims.intermediate_multiple, generator)
    most = min(largest.tokens, max(1, largest.hidden // (top_k * inter)))
    flag = (False, True)
    return {
        "keys": generator.choice(keys),
        "activation": generator.choice(activations_of(claims)),
        "tokens": 0 if generator.random() < 1 / 50 else _log_uniform(1, most, generator),
        "routing": "uniform" if claims.routing_methods is not None else generator.choice((*ROUTINGS, SKEWED, SKEWED)),
        "shape": (hidden, inter),
        "experts": (count, top_k),
        "dtype": generator.choice(sorted(claims.dtypes, key=str)),
        "bias": generator.choice(flag) and claims.bias,
        "map": generator.choice(flag) and claims.expert_map,
        "ids": generator.choice((torch.int32, torch.int64)),
        "strided": generator.choice(flag),
        "on_input": generator.choice(flag) and claims.apply_router_weight_on_input and top_k == 1,
        "format": generator.choice(sorted(claims.formats, key=lambda layout: layout.value)),
        "method": None if claims.routing_methods is None else generator.choice(sorted(claims.routing_methods)),
        "lora": claims.lora and generator.random() < 1 / 8,
    }


def _size(most: int, multiple: int, generator: random.Random) -> int:
    """A multiple of ``multiple`` up to ``most``, or ``multiple``: often one of tiles, else any."""
    step = max(multiple, generator.choice((1, 1, 8, 16, 32, 64, 128)))
    step = -(-step // multiple) * multiple
    return step * _log_uniform(1, max(1, most // step), generator)


def _log_uniform(least: int, most: int, generator: random.Random) -> int:
    """A whole number whose logarithm is uniform: as many small ones as large ones."""
    return min(most, int(least * ((most + 1) / least) ** generator.random()))
