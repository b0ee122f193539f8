"""Quantised mixture-of-experts models in transformers, their experts run by moe-core."""

from __future__ import annotations

from moe_transformers.version import TransformersVersionError, check_version

check_version()  # first: the modules below import what other releases of transformers lack

from moe_transformers.experts import MoeCoreExperts  # noqa: E402
from moe_transformers.interface import ExpertsMemoryWarning, prepare_experts  # noqa: E402
from moe_transformers.loading import loading  # noqa: E402
from moe_transformers.quantize import quantize_experts  # noqa: E402
from moe_transformers.refusals import RefusedError  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "ExpertsMemoryWarning",
    "MoeCoreExperts",
    "RefusedError",
    "TransformersVersionError",
    "loading",
    "prepare_experts",
    "quantize_experts",
]
