"""Base classes for the experts of a backend, in addition to the names of :mod:`moe_core`.

This module does not import Triton, so a module that defines experts may import it at the top. Code that runs inside
kernels is in :mod:`moe_core.api.kernels`, which experts import when they build a kernel. Names change meaning or are
removed only with a new major version of :data:`moe_core.KERNEL_API`.

**Experts on core's kernels**: a subclass of :class:`GroupedExperts` adds claims, weight conversion, an activation
scheme and its weights in the kernels' layout. :class:`ScaledMMExperts` is the base for 8-bit weights and activations
whose scales are constant along K. :class:`ScaledGemvExperts` adds the small-M path that needs no sort, for these and
others. :class:`MarlinExperts` adds it for weights that are repacked at load and dequantized in registers.
:class:`MarlinIntegerExperts` already supports 4- and 8-bit integers.

**Experts on other kernels** that only launch kernels through core derive from :class:`RecordableExperts`: their calls
are replayed.

**Launch heuristics** choose a :class:`TilePlan`, which has a :class:`TileConfig` for each GEMM, from the
:class:`LayerProblem`. This is the experts' ``problem``, which a subclass may extend. A new element type brings
:class:`LaunchRules` with a table of :class:`Regime` rows, and adds them by :func:`add_rules`.

**Weights in other layouts**: :func:`as_words` for weights that are read as stored; :func:`order_words`,
:func:`interleave`, :func:`relative_e8m0` and :func:`relative_scales` for the Marlin family.

**Experts in plain torch**: helpers for subclasses of :class:`moe_core.TorchExperts` that override how the tokens of one
expert are computed (``results``), and activation quantization as the reference defines it.
"""

from __future__ import annotations

from moe_core.interface.recordable import RecordableExperts
from moe_core.kernels.experts.grouped import WHOLE_COLUMNS, GroupedExperts
from moe_core.kernels.experts.marlin import MarlinExperts, MarlinIntegerExperts
from moe_core.kernels.experts.scaled_gemv import ScaledGemvExperts
from moe_core.kernels.experts.scaled_mm import ScaledMMExperts
from moe_core.kernels.gemm.fragments.fragment_order import as_words, interleave, order_words
from moe_core.kernels.gemm.fragments.scales import relative_e8m0, relative_scales
from moe_core.kernels.gemm.heuristics import LayerProblem
from moe_core.kernels.gemm.heuristics.cost import Speed
from moe_core.kernels.gemm.heuristics.gemv import GemvRules
from moe_core.kernels.gemm.heuristics.regimes import Change, Regime, Tile, within
from moe_core.kernels.gemm.heuristics.rules import LaunchRules, add_rules
from moe_core.kernels.gemm.plan import TileConfig, TilePlan
from moe_core.reference.quantization import integer_row_scales, quantize_tensor
from moe_core.reference.torch_experts import Adapters, expert_slices, of_expert

__all__ = [
    # Experts on core's kernels.
    "WHOLE_COLUMNS",
    "GroupedExperts",
    "MarlinExperts",
    "MarlinIntegerExperts",
    "RecordableExperts",
    "ScaledGemvExperts",
    "ScaledMMExperts",
    # Launch heuristics.
    "Change",
    "GemvRules",
    "LaunchRules",
    "LayerProblem",
    "Regime",
    "Speed",
    "Tile",
    "TileConfig",
    "TilePlan",
    "add_rules",
    "within",
    # Weights in other layouts.
    "as_words",
    "interleave",
    "order_words",
    "relative_e8m0",
    "relative_scales",
    # Experts in plain torch.
    "Adapters",
    "expert_slices",
    "integer_row_scales",
    "of_expert",
    "quantize_tensor",
]
