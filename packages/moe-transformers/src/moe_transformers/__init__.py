"""Quantised mixture-of-experts models in transformers, their experts run by moe-core."""

from __future__ import annotations

from moe_transformers.experts import MoeCoreExperts
from moe_transformers.interface import ExpertsMemoryWarning, prepare_experts
from moe_transformers.loading import loading
from moe_transformers.quantize import quantize_experts
from moe_transformers.refusals import RefusedError
from moe_transformers.version import TransformersVersionError, check_version

__version__ = "0.1.0"

__all__ = [
    "ExpertsMemoryWarning",
    "MoeCoreExperts",
    "RefusedError",
    "TransformersVersionError",
    "check_version",
    "loading",
    "prepare_experts",
    "quantize_experts",
]
