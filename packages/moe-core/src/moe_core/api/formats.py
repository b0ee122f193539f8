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
an :class:`ExpertStorage`: the settings from the config. Their ``layout`` is a :class:`QuantizedLayout`, which describes
how such tensors are laid out.

**Quantization configs of tools**: :func:`quant_group` (compressed-tensors), :func:`quant_algo` (ModelOpt),
:func:`quark_layer` (Quark), :func:`gptq_settings` (GPTQ, AWQ) and :func:`auto_round_settings` (AutoRound) parse the
settings of a layer. For other tools, :class:`QuantEntries` reads typed entries.

**Tensors** are found by the last part of their names (:func:`one_suffix`, :data:`INPUT_SCALES` …) and checked by
:func:`check_expert_tensor`. :func:`load_stacked` loads them a few experts at a time. :func:`load_checked` does the same
and rejects values that a checkpoint must not contain. Alternatively, :meth:`QuantizedLayout.stack` may request them by
``yield`` :class:`Stack` and ``yield from`` :func:`checked`; w13 and w2 are then read together.

**A small checkpoint** (:attr:`moe_core.Scheme.quickstart`) is a :class:`SmallModel`, e.g. :func:`qwen3_moe`.
"""

from __future__ import annotations

from moe_core.checkpoint.config.quant_args import QuantEntries, short
from moe_core.checkpoint.config.statements import quantizers
from moe_core.checkpoint.experts.checks import check_expert_tensor
from moe_core.checkpoint.experts.layer_experts import LayerExperts
from moe_core.checkpoint.experts.matrices import (
    ExpertMatrices,
    gate_rows_first,
    is_interleaved,
    is_transposed,
    module_name,
    stored_matrix,
)
from moe_core.checkpoint.experts.quantized import ExpertStorage, QuantizedFormat, QuantizedLayout
from moe_core.checkpoint.experts.sliced import Axes, StoredAxis
from moe_core.checkpoint.experts.stacks import Asking, BadValuesError, Stack, load_stacked
from moe_core.checkpoint.experts.suffixes import (
    INPUT_SCALES,
    ZERO_POINTS,
    check_stated_shape,
    missing,
    missing_tensor,
    one_suffix,
    refuse_mixed,
    refuse_zero_points,
)
from moe_core.checkpoint.experts.values import Values, checked, load_checked, refuse_lost_weights
from moe_core.checkpoint.small_model import SmallModel, qwen3_moe
from moe_core.checkpoint.tools.auto_round import AutoRoundSettings, auto_round_settings, is_auto_rounds
from moe_core.checkpoint.tools.compressed_tensors import QuantArgs, QuantGroup, quant_group
from moe_core.checkpoint.tools.gptq import GptqSettings, gptq_settings
from moe_core.checkpoint.tools.modelopt import quant_algo, unknown_algo
from moe_core.checkpoint.tools.quark import QuarkArgs, QuarkLayer, quark_layer
from moe_core.checkpoint.written import write_folder
from moe_core.interface.checkpoint_format import CheckpointFormat, ExpertLayout

__all__ = [
    "INPUT_SCALES",
    "ZERO_POINTS",
    "Asking",
    "AutoRoundSettings",
    "Axes",
    "BadValuesError",
    "CheckpointFormat",
    "ExpertLayout",
    "ExpertMatrices",
    "ExpertStorage",
    "GptqSettings",
    "LayerExperts",
    "QuantArgs",
    "QuantEntries",
    "QuantGroup",
    "QuantizedFormat",
    "QuantizedLayout",
    "QuarkArgs",
    "QuarkLayer",
    "SmallModel",
    "Stack",
    "StoredAxis",
    "Values",
    "auto_round_settings",
    "check_expert_tensor",
    "check_stated_shape",
    "checked",
    "gate_rows_first",
    "gptq_settings",
    "is_auto_rounds",
    "is_interleaved",
    "is_transposed",
    "load_checked",
    "load_stacked",
    "missing",
    "missing_tensor",
    "module_name",
    "one_suffix",
    "quant_algo",
    "quant_group",
    "quantizers",
    "quark_layer",
    "qwen3_moe",
    "refuse_lost_weights",
    "refuse_mixed",
    "refuse_zero_points",
    "short",
    "stored_matrix",
    "unknown_algo",
    "write_folder",
]
