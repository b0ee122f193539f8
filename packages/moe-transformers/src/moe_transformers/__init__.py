"""Quantized mixture-of-experts models in transformers, with experts run by moe-core.

Importing this package imports nothing else, to keep ``moe --help`` fast. Each public name loads its module on first
use, after a check of the installed transformers version.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_transformers.experts import MoeCoreExperts as MoeCoreExperts
    from moe_transformers.interface import ExpertsMemoryWarning as ExpertsMemoryWarning
    from moe_transformers.interface import prepare_experts as prepare_experts
    from moe_transformers.model_loading import loading as loading
    from moe_transformers.quantize import quantize_experts as quantize_experts
    from moe_transformers.refusals import RefusedError as RefusedError
    from moe_transformers.version import TransformersVersionError as TransformersVersionError

__version__ = "0.1.0"

_HOME_OF = {
    "ExpertsMemoryWarning": "interface",
    "MoeCoreExperts": "experts",
    "RefusedError": "refusals",
    "TransformersVersionError": "version",
    "loading": "model_loading",
    "prepare_experts": "interface",
    "quantize_experts": "quantize",
}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    version = importlib.import_module("moe_transformers.version")
    if home != "version":
        # check first: other modules import names that unsupported versions may lack
        version.check_version()
    value = globals()[name] = getattr(importlib.import_module(f"moe_transformers.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
