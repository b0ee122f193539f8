"""Bases of experts, for packages that bring a backend, beside the names of :mod:`moe_core` itself.

Nothing here imports Triton, so a module that defines experts may import this at its top.  What runs inside kernels is
in :mod:`moe_core.api.kernels`, which experts import when they make a kernel.  Names change their meaning, or go, with a
new major :data:`moe_core.KERNEL_API` only.

**Experts on the kernels of core**: a subclass of :class:`GroupedExperts` adds claims, the conversion of weights, an
activation scheme and its weights as the kernels read them.  :class:`ScaledMMExperts` is the base for 8-bit weights and
activations whose scales do not change along k, :class:`ScaledGemvExperts` adds the few tokens of those and others that
need no sort, :class:`MarlinExperts` that for weights that are repacked at load and
dequantised in registers; :class:`MarlinIntegerExperts` has 4- and 8-bit integers already.

**Launch heuristics** choose a :class:`TilePlan`, a :class:`TileConfig` for each GEMM, by the :class:`LayerProblem`: the
experts' ``problem``, to which a subclass adds what is its own.

**Weights in other layouts**: :func:`as_words` for those that are read as stored; :func:`order_words`,
:func:`interleave`, :func:`relative_e8m0` and :func:`relative_scales` for those of the Marlin family.

**Experts in plain torch**: what a subclass of :class:`moe_core.TorchExperts` needs that overrides how one expert's
tokens are computed (``results``), and quantised activations as the reference defines them.
"""

from __future__ import annotations

from moe_core.kernels.experts.grouped import WHOLE_COLUMNS, GroupedExperts
from moe_core.kernels.experts.marlin import MarlinExperts, MarlinIntegerExperts
from moe_core.kernels.experts.scaled_gemv import ScaledGemvExperts
from moe_core.kernels.experts.scaled_mm import ScaledMMExperts
from moe_core.kernels.gemm.fragments.fragment_order import as_words, interleave, order_words
from moe_core.kernels.gemm.fragments.scales import relative_e8m0, relative_scales
from moe_core.kernels.gemm.heuristics import LayerProblem
from moe_core.kernels.gemm.plan import TileConfig, TilePlan
from moe_core.reference.quantization import integer_row_scales, quantize_tensor
from moe_core.reference.torch_experts import Adapters, expert_slices, of_expert

__all__ = [
    # experts on the kernels of core
    "WHOLE_COLUMNS",
    "GroupedExperts",
    "MarlinExperts",
    "MarlinIntegerExperts",
    "ScaledGemvExperts",
    "ScaledMMExperts",
    # launch heuristics
    "LayerProblem",
    "TileConfig",
    "TilePlan",
    # weights in other layouts
    "as_words",
    "interleave",
    "order_words",
    "relative_e8m0",
    "relative_scales",
    # experts in plain torch
    "Adapters",
    "expert_slices",
    "integer_row_scales",
    "of_expert",
    "quantize_tensor",
]
