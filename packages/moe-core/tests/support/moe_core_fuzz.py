"""Configs with something changed, and what reading such a folder may do."""

from __future__ import annotations

import copy
import random
from typing import Any

from moe_core import MoEError
from moe_core.checkpoint import Checkpoint, read_layer

ODD = (
    None,
    True,
    False,
    -1,
    0,
    1,
    2**70,
    1.5,
    float("nan"),
    "",
    "channel",
    "tensor",
    "per_tensor",
    "re:(",
    "\0",
    [],
    {},
)


def changed(value: Any, rng: random.Random) -> Any:
    """A copy of a JSON value with an entry changed, removed or nested, somewhere in it."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        found = copy.deepcopy(value)
        key = rng.choice(list(found))
        if rng.random() < 0.15:
            del found[key]
        else:
            found[key] = changed(found[key], rng)
        return found
    if isinstance(value, list) and value and rng.random() < 0.6:
        found_list = copy.deepcopy(value)
        at = rng.randrange(len(found_list))
        found_list[at] = changed(found_list[at], rng)
        return found_list
    return rng.choice((*ODD, [value], {"a": value}))


def read(checkpoint: Checkpoint) -> bool:
    """Whether the layer loads; its weights fit their keys."""
    try:
        found = read_layer(checkpoint)
        weights = found.weights()
    except MoEError:
        return False
    weights.validate(found.config, values=True)
    return True
