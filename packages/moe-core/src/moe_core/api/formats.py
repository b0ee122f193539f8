"""The part of core that packages may use to read checkpoints.

It adds to the names of :mod:`moe_core`. A package that adds checkpoint formats imports from here and from
:mod:`moe_core` (quant keys, errors, weights, quantizers, registration). Experts and kernels have separate modules:
:mod:`moe_core.api.experts`, :mod:`moe_core.api.kernels`, :mod:`moe_core.api.sm90` and :mod:`moe_core.api.libraries`.
Everything else in core may change at any time. Names in this module change meaning or are removed only with a new major
version of :data:`moe_core.FORMAT_API`. This module does not import Triton.

**A format** inspects one layer (:class:`LayerExperts`: its tensors by expert, projection and suffix). It returns an
:class:`ExpertLayout`, which has the keys and loads canonical weights, or the reason why it does not apply::

    class MyFormat(CheckpointFormat):
        format_api = (1, 0)
        name = "experts of mine"
        quant_methods = ("mine",)

        def resolve(self, quantization, layer):
            if quantization.get("quant_method") != "mine":
                return "quant_method is not 'mine'"
            return MyLayout(layer, kFp8StaticChannelSym, kFp8DynamicTokenSym)

:class:`QuantizedFormat` is the base of formats whose tensors are read alike for several tools. Its ``storage`` returns
an :class:`ExpertStorage`: the settings from the config. Its ``layout`` is a :class:`QuantizedLayout`: a table of the
tensors, one :class:`TensorRule` each, by which they are found, checked, sliced and loaded.

**Quantization configs of tools**: :func:`quant_group` (compressed-tensors), :func:`quant_algo` (ModelOpt),
:func:`quark_layer` (Quark), :func:`gptq_settings` (GPTQ, AWQ) and :func:`auto_round_settings` (AutoRound) parse the
settings of a layer. For other tools, :class:`QuantEntries` reads typed entries.

**Other tensors** can be loaded a few experts at a time by :func:`load_stacked`. :func:`load_checked` does the same and
rejects values that a checkpoint must not contain.

**A small checkpoint** (:attr:`moe_core.Scheme.quickstart`) is a :class:`SmallModel`, e.g. :func:`qwen3_moe`.
"""

from __future__ import annotations

from moe_core.checkpoint.config.quant_args import QuantEntries, short
from moe_core.checkpoint.config.statements import quantizers
from moe_core.checkpoint.experts.layer_experts import LayerExperts
from moe_core.checkpoint.experts.matrices import (
    gate_rows_first,
    is_interleaved,
    is_transposed,
    module_name,
    stored_matrix,
)
from moe_core.checkpoint.experts.quantized import ExpertStorage, QuantizedFormat, QuantizedLayout
from moe_core.checkpoint.experts.rules import FLOATS, Matrix, Shape, TensorRule, as_float32, per_matrix, scalar
from moe_core.checkpoint.experts.stacks import BadValuesError, ExpertStack, Query, load_stacked
from moe_core.checkpoint.experts.suffixes import INPUT_SCALES, one_suffix
from moe_core.checkpoint.experts.values import Values, load_checked
from moe_core.checkpoint.small_model import SmallModel, qwen3_moe
from moe_core.checkpoint.tools.auto_round import AutoRoundSettings, auto_round_settings, is_auto_rounds
from moe_core.checkpoint.tools.compressed_tensors import QuantArgs, QuantGroup, quant_group
from moe_core.checkpoint.tools.gptq import GptqSettings, gptq_settings
from moe_core.checkpoint.tools.modelopt import quant_algo, unknown_algo
from moe_core.checkpoint.tools.quark import QuarkArgs, QuarkLayer, quark_layer
from moe_core.checkpoint.written import write_folder
from moe_core.interface.checkpoint_format import CheckpointFormat, ExpertLayout

__all__ = [
    "FLOATS",
    "INPUT_SCALES",
    "AutoRoundSettings",
    "BadValuesError",
    "CheckpointFormat",
    "ExpertLayout",
    "ExpertStack",
    "ExpertStorage",
    "GptqSettings",
    "LayerExperts",
    "Matrix",
    "QuantArgs",
    "QuantEntries",
    "QuantGroup",
    "QuantizedFormat",
    "QuantizedLayout",
    "QuarkArgs",
    "QuarkLayer",
    "Query",
    "Shape",
    "SmallModel",
    "TensorRule",
    "Values",
    "as_float32",
    "auto_round_settings",
    "gate_rows_first",
    "gptq_settings",
    "is_auto_rounds",
    "is_interleaved",
    "is_transposed",
    "load_checked",
    "load_stacked",
    "module_name",
    "one_suffix",
    "per_matrix",
    "quant_algo",
    "quant_group",
    "quantizers",
    "quark_layer",
    "qwen3_moe",
    "scalar",
    "short",
    "stored_matrix",
    "unknown_algo",
    "write_folder",
]
