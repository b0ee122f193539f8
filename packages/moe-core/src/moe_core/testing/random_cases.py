"""Conformance layers drawn at random from the claims of a class.

Example: ``--moe-budget random:30:7``.

The covering cases of :mod:`moe_core.testing.cases` use a few hand-picked sizes. Here sizes, numbers of experts and
tokens, the routing skew and every claimed value are random, so that unforeseen shapes occur. The n-th case of a class
depends only on the seed and n.
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

#: number of draws within which a class must support one layer
TRIES = 400


def parse_budget(text: str) -> tuple[int, int] | None:
    """Parse "random:COUNT" or "random:COUNT:SEED".

    Args:
        text: Name of a budget.

    Returns:
        (number of layers, seed of the draws); None for the name of another budget.

    Raises:
        ConfigError: ``text`` is anything else.
    """
    name, *numbers = text.split(":")
    if text in BUDGETS:
        return None
    if name != "random" or not 1 <= len(numbers) <= 2 or not all(n.isascii() and n.isdigit() for n in numbers):
        raise ConfigError(f"the budget is {', '.join(BUDGETS)} or random:COUNT[:SEED], got {text!r}")
    count, seed = (*map(int, numbers), 0)[:2]
    return whole_number("the number of random cases", count), seed


@dataclass(frozen=True)
class Largest:
    """Size limits of the drawn layers.

    Attributes:
        size: Hidden and intermediate size.
        tokens: Number of tokens.
        experts: Number of experts.
        weights: Elements of all weights.
        hidden: Elements of h: routed rows times intermediate size.
    """

    size: int
    tokens: int
    experts: int
    weights: int
    hidden: int


#: limits on a GPU: many rows per expert, and weights that the CPU draws in under a second
ON_GPU = Largest(size=3000, tokens=4096, experts=160, weights=1 << 24, hidden=1 << 24)
#: limits in Triton's interpreter and in plain torch on the CPU
ON_CPU = Largest(size=300, tokens=64, experts=16, weights=1 << 19, hidden=1 << 14)


def random_cases(
    experts: type[FusedMoEExperts], count: int, seed: int, *, target: DeviceInfo, large: bool = False
) -> list[Case]:
    """Draw cases of the check "values" from the claims of a class.

    Args:
        experts: Experts class.
        count: Number of cases.
        seed: Seed of the draws.
        target: Device that the experts are created for.
        large: Whether to draw sizes for a GPU.

    Returns:
        ``count`` cases; none if a library that the class requires is missing.

    Raises:
        ConfigError: The class refuses every layer drawn from its own claims.
    """
    if any(map(Environment.current().reason_against, experts.claims.requires)):
        return []
    found = []
    keys = expand_keys(experts.claims)
    for number in range(count):
        # Seeded with a string, so that seed 1 with case 12 differs from seed 11 with case 2.
        generator = random.Random(f"{experts.__qualname__} {seed} {number}")
        found.append(_drawn(experts, keys, target, ON_GPU if large else ON_CPU, generator))
    return found


def _drawn(
    experts: type[FusedMoEExperts],
    keys: Sequence[KeyPair],
    target: DeviceInfo,
    largest: Largest,
    generator: random.Random,
) -> Case:
    """Return one case that the class supports."""
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
    """Return one value per factor of a case."""
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
    """Return a multiple of ``multiple`` up to ``most``, often also a multiple of a tile size.

    The smallest result is ``multiple``, even if it exceeds ``most``.
    """
    step = max(multiple, generator.choice((1, 1, 8, 16, 32, 64, 128)))
    step = -(-step // multiple) * multiple
    return step * _log_uniform(1, max(1, most // step), generator)


def _log_uniform(least: int, most: int, generator: random.Random) -> int:
    """Draw a log-uniformly distributed integer."""
    return min(most, int(least * ((most + 1) / least) ** generator.random()))
