"""What packages may use of core to read checkpoints, beside the names of :mod:`moe_core` itself.

A package that brings checkpoint formats imports from here and from :mod:`moe_core` (quant keys, errors, weights,
quantisers, registration); experts and kernels have modules of their own (:mod:`moe_core.api.experts`,
:mod:`moe_core.api.kernels`, :mod:`moe_core.api.sm90`, :mod:`moe_core.api.libraries`).  Whatever else core holds may
change at any time.  Names of these modules change their meaning, or go, with a new major :data:`moe_core.FORMAT_API`
only.  Nothing here imports Triton.

**A format** looks at one layer (:class:`LayerExperts`: its tensors by expert, projection and suffix) and returns an
:class:`ExpertLayout`, which has the keys and loads canonical weights, or the reason against::

    class MyFormat(CheckpointFormat):
        format_api = (1, 0)
        name = "experts of mine"
        quant_methods = ("mine",)

        def resolve(self, quantization, layer):
            if quantization.get("quant_method") != "mine":
                return "quant_method is not 'mine'"
            return MyLayout(layer, kFp8StaticChannelSym, kFp8DynamicTokenSym)

:class:`QuantizedFormat` is the base of formats whose tensors are read alike for several tools: its ``storage`` returns
an :class:`ExpertStorage`, what the config says, whose ``layout`` is a :class:`QuantizedLayout`, how such tensors lie.

**What tools' configs say** of a layer is parsed here: :func:`quant_group` (compressed-tensors), :func:`quant_algo`
(ModelOpt), :func:`quark_layer` (Quark), :func:`gptq_settings` (GPTQ, AWQ), :func:`auto_round_settings` (AutoRound); of
others :class:`QuantEntries` reads typed entries.

**Tensors** are found by the last part of their names (:func:`one_suffix`, :data:`INPUT_SCALES` …), checked by
:func:`check_expert_tensor`, and loaded, some experts at a time, by :func:`load_stacked` or by
:func:`load_checked`, which refuses values that a checkpoint must not hold.  :meth:`QuantizedLayout.stack` may ask for
them instead, by ``yield`` :class:`Stack` and ``yield from`` :func:`checked`: w13 and w2 are then read together.

**A small checkpoint** (:attr:`moe_core.Scheme.quickstart`) is written by :func:`write_folder`.
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
    "refuse_lost_weights",
    "refuse_mixed",
    "refuse_zero_points",
    "short",
    "stored_matrix",
    "unknown_algo",
    "write_folder",
]
