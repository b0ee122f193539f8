"""Shared code for packages that integrate the experts into whole models.

It adds to the names of :mod:`moe_core`. Such a package loads a model's experts with :func:`load_layers` and leaves
everything else to the model's own library. Before any large read it queries what each layer is (:func:`describe`,
:func:`unquantized_reason`), which backend would run it (:func:`choose`) and how much memory it takes
(:func:`moe_core.layer_memory`). It may dequantize other quantized modules of the checkpoint to 16 bits
(:func:`quantized_linears`), and read 16-bit experts in one layout, however they are stored
(:func:`unquantized_tensor`). Names change meaning or are removed only with a new major version of
:data:`moe_core.INTERFACE_API`.
"""

from __future__ import annotations

from moe_core.checkpoint.config.keys import names_experts
from moe_core.checkpoint.experts.find_layer import find_layer
from moe_core.checkpoint.experts.matrices import unquantized_reason
from moe_core.checkpoint.experts.unquantized import unquantized_tensor
from moe_core.checkpoint.files.tensor_names import parse_name, predicts_ahead
from moe_core.checkpoint.linear import QuantizedLinear, quantized_linears
from moe_core.checkpoint.model import PER_CALL, ModelSettings
from moe_core.checkpoint.source import LayerSource, read_layer
from moe_core.layer.loading import ChosenLayer, choose, load_layers
from moe_core.layer.request import LayerRequest, describe
from moe_core.layer.state_dicts import ExpertsForm

__all__ = [
    "PER_CALL",
    "ChosenLayer",
    "ExpertsForm",
    "LayerRequest",
    "LayerSource",
    "ModelSettings",
    "QuantizedLinear",
    "choose",
    "describe",
    "find_layer",
    "load_layers",
    "names_experts",
    "parse_name",
    "predicts_ahead",
    "quantized_linears",
    "read_layer",
    "unquantized_reason",
    "unquantized_tensor",
]
