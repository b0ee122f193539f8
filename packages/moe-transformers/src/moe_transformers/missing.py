"""Detection of experts without checkpoint values, which would be initialized at random."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from moe_core import CheckpointError
from moe_core.api.models import parse_name

#: names of modules that hold experts ("experts", "shared_expert", "expert_0", "shared_mlp"), and their class names
_NAMED = re.compile(r"(^|_)experts?($|_)|^shared_mlp$")
_CLASS = re.compile(r"Experts?$")


def refuse_missing_experts(model: Any, missing: Iterable[str]) -> None:
    """Raise CheckpointError if a missing parameter belongs to an experts module.

    Args:
        model: A model of transformers.
        missing: Names of parameters that the checkpoint lacks or has with another shape.
    """
    tied = getattr(model, "all_tied_weights_keys", {})
    names = sorted(name for name in missing if name not in tied and _is_of_experts(model, name))
    if names:
        count = f"{len(names)} parameters" if len(names) > 1 else "a parameter"
        raise CheckpointError(
            f"{names[0]} is missing from the checkpoint, or has another name or shape there: {count} of "
            f"{type(model).__name__}'s experts would have random values; pass all files of the checkpoint, "
            "with the config.json that belongs to them",
            details="\n".join(names),
        )


def _is_of_experts(model: Any, name: str) -> bool:
    if parse_name(name) is not None:
        return True
    parts = name.split(".")[:-1]
    modules = (model.get_submodule(".".join(parts[:end])) for end in range(1, len(parts) + 1))
    return any(
        _NAMED.search(part) or _CLASS.search(type(module).__name__) for part, module in zip(parts, modules, strict=True)
    )
