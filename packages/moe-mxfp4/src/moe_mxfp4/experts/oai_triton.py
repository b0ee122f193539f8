"""OpenAI's `triton_kernels` on sm_90: MXFP4 weights with bfloat16 activations.

The library was released with gpt-oss. It computes the two grouped GEMMs. Sorting and the top-k reduction are
moe-core's, so routing, ids and expert maps work as in other backends:

    sort      pairs by expert                             expert e: rows offsets[e] to offsets[e + 1]
    product   h = act(x[token] w13^T + b13)               rows gathered on the way
    product   y = h w2^T + b2                             out[token] = sum over slots of weight * y

The library's SwiGLU, which adds 1 to up, is fused into the first GEMM; gate and up rows are then interleaved. Other
activations run in moe-core's kernel between the two GEMMs.

Codes and scales are swizzled as in `moe_mxfp4.libraries.hopper_layout`; biases are float32. N is zero-padded to a
multiple of 64, and scales to whole steps of 128 columns, since the library reads whole steps.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from moe_core import (
    GATED,
    NON_GATED,
    TRITON,
    Claims,
    ExpertTokensMetadata,
    FusedMoEExpertsModular,
    KernelWeights,
    MoEActivation,
    MoEWeights,
    TensorError,
    WorkspaceSpec,
    cuda,
    kMxfp4Static,
)
from moe_core.api.libraries import (
    by_experts,
    fused_activation,
    interleave_halves,
    pad_matrices,
    reduce_pairs,
    sort_pairs,
    sort_workspaces,
)
from torch import Tensor

from moe_mxfp4.groups import GROUP
from moe_mxfp4.libraries import TRITON_KERNELS
from moe_mxfp4.libraries.hopper_layout import swizzled_scales, swizzled_weights
from moe_mxfp4.libraries.oai_triton import load_triton_kernels
from moe_mxfp4.padding import PaddedExperts, round_up

#: columns per mainloop step of the library
STEP = 128
#: tile height for sorting pairs: arbitrary, since the library splits experts into tiles itself
_TILE = 64


class OAITritonExperts(PaddedExperts, FusedMoEExpertsModular):
    """MXFP4 layer as two calls of ``matmul_ogs``."""

    claims = Claims(
        devices=(cuda(min=90, max=90),),
        keys=((kMxfp4Static, None),),
        activations=GATED | NON_GATED,
        dtypes=frozenset({torch.bfloat16}),
        bias=True,
        hidden_multiple=64,
        intermediate_multiple=GROUP,
        allocates=True,
        keeps_nan=False,
        requires=(TRITON_KERNELS, TRITON),
        verified_on=("NVIDIA H200 (sm90)",),
        notes="reads the releases that have matmul_ogs and routing (3.5)",
    )

    @classmethod
    def padded_sizes(cls, hidden_size: int, intermediate_size: int) -> tuple[int, int]:
        return hidden_size, round_up(intermediate_size, 64)

    @staticmethod
    def library() -> Any:
        """Return the library's functions, imported on first use."""
        return load_triton_kernels()

    @functools.cached_property
    def _calls(self) -> Any:
        return self.library()

    @property
    def _shapes(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of each matrix."""
        hidden, inter = self.hidden_size, self.intermediate_size
        return {"w13": (2 * inter if self.config.is_gated else inter, hidden), "w2": (hidden, inter)}

    @property
    def fuses(self) -> bool:
        """Whether the library's fused SwiGLU computes the activation."""
        return self.config.activation is MoEActivation.SWIGLUOAI and self.config.params.beta == 1.0

    def convert(self, weights: MoEWeights) -> KernelWeights:
        w13_scale, w2_scale = weights.weight_scales
        first, second, parts = self._shapes["w13"], self._shapes["w2"], 2 if self.config.is_gated else 1
        biases: dict[str, Any] = {}
        if weights.w13_bias is not None and weights.w2_bias is not None:
            biases["w1_bias"] = _padded(weights.w13_bias.float().unsqueeze(2), first[0], 1, parts, self.fuses).squeeze(
                2
            )
            biases["w2_bias"] = weights.w2_bias.float().contiguous()
        return KernelWeights(
            w13=_swizzled(weights.w13, *first, parts=parts, turns=self.fuses),
            w2=_swizzled(weights.w2, *second),
            quant_config=weights.quant_config(
                w1_scale=_swizzled_scale(w13_scale, *first, parts=parts, turns=self.fuses),
                w2_scale=_swizzled_scale(w2_scale, *second),
                **biases,
            ),
        )

    def operand(self, name: str, weights: KernelWeights) -> dict[str, Any]:
        """Return the ``matmul_ogs`` arguments of a matrix: ``w``, its scales and its bias.

        Args:
            name: "w13" or "w2".
            weights: converted weights.

        Raises:
            TensorError: the scale is missing.
        """
        calls, experts, (rows, cols) = self._calls, self.config.local_experts, self._shapes[name]
        quant = weights.quant_config
        codes, desc = (weights.w13, quant.w1) if name == "w13" else (weights.w2, quant.w2)
        if desc.scale is None:
            raise TensorError(f"{name}_scale is missing")
        # the library's matrices are column-major
        values = calls.HopperMXValueLayout([experts, cols // 2, rows], mx_axis=1)
        scales = calls.HopperMXScaleLayout([experts, cols // GROUP, rows], mx_axis=1, num_warps=_warps(rows))
        return {
            "w": calls.Tensor(calls.Storage(codes.mT, values), dtype=calls.FP4, shape=[experts, cols, rows]),
            "bias": desc.bias,
            "precision_config": calls.PrecisionConfig(weight_scale=calls.Tensor(calls.Storage(desc.scale.mT, scales))),
        }

    def product(self, name: str, x: Tensor, out: Tensor, weights: KernelWeights, **rows: Any) -> None:
        """Multiply ``x`` by a matrix, for rows grouped by expert.

        Args:
            name: "w13" or "w2".
            x: activations.
            out: result [P, rows of the matrix].
            weights: converted weights.
            rows: ``matmul_ogs`` arguments that assign rows to experts.
        """
        self._calls.matmul_ogs(x=x, y=out.unsqueeze(0), **self.operand(name, weights), **rows)

    @property
    def activation(self) -> Any:
        """SwiGLU fused into the first GEMM, with the config's alpha and limit."""
        calls, params = self._calls, self.config.params
        limit = None if params.limit in (None, float("inf")) else params.limit
        specs = calls.FnSpecs("swiglu", calls.swiglu_fn, ("alpha", "limit"))
        return calls.FusedActivation(specs, (params.alpha, limit), 2)

    def routing(self, pairs: Tensor, counts: Tensor) -> dict[str, Any]:
        """Return the ``matmul_ogs`` arguments that assign rows to experts.

        Args:
            pairs: [P], (token, expert) pairs sorted by expert.
            counts: int32 [E], pairs per expert.
        """
        calls, experts = self._calls, self.config.local_experts
        data = calls.compute_expt_data(counts, experts, pairs.numel())
        return {"routing_data": calls.RoutingData(None, counts, experts, self.config.top_k, expt_data=data)}

    def workspaces(self, num_tokens: int) -> tuple[WorkspaceSpec, ...]:
        config = self.config
        pairs = num_tokens * config.top_k
        (rows, _), (hidden, inter) = self._shapes["w13"], self._shapes["w2"]
        return (
            *sort_workspaces(pairs, config.local_experts, _TILE),
            WorkspaceSpec("counts", (config.local_experts,), torch.int32),
            WorkspaceSpec("z", (0 if self.fuses else pairs * rows,), config.dtype),
            WorkspaceSpec("h", (pairs * inter,), config.dtype),
            WorkspaceSpec("y", (pairs * hidden,), config.dtype),
        )

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        weights: KernelWeights,
        *,
        topk_weights: Tensor,
        topk_ids: Tensor,
        workspace: Mapping[str, Tensor],
        expert_map: Tensor | None = None,
        hidden_states_scale: Tensor | None = None,
        expert_tokens: ExpertTokensMetadata | None = None,
    ) -> None:
        config, experts, total = self.config, self.config.local_experts, topk_ids.numel()
        (rows, _), (hidden, inter) = self._shapes["w13"], self._shapes["w2"]
        order = sort_pairs(topk_ids, experts, _TILE, workspace=workspace, expert_map=expert_map, positions=True)
        pairs, offsets = order.pairs[:total], order.offsets
        counts = torch.sub(offsets[1 : experts + 1], offsets[:experts], out=workspace["counts"])
        routing = self.routing(pairs, counts)
        h, y = _matrix(workspace["h"], total, inter), _matrix(workspace["y"], total, hidden)
        z = h if self.fuses else _matrix(workspace["z"], total, rows)
        activation = {"fused_activation": self.activation} if self.fuses else {}
        gather = self._calls.GatherIndx(pairs, pairs)
        self.product("w13", hidden_states, z, weights, gather_indx=gather, **activation, **routing)
        if not self.fuses:
            used = offsets[experts : experts + 1]
            fused_activation(config.activation, z, params=config.params, row_counts=used, out=h)
        self.product("w2", h, y, weights, **routing)
        reduce_pairs(
            y,
            topk_ids,
            experts,
            output,
            topk_weights=topk_weights,
            expert_map=expert_map,
            rows=order.positions,
        )


def _matrix(flat: Tensor, rows: int, columns: int) -> Tensor:
    return flat[: rows * columns].view(rows, columns)


def _warps(rows: int) -> int:
    """Return the warps of the MMA: 8 warps cover 32 rows each of a 256-row tile."""
    return 8 if rows > 128 else 4


def _swizzled(w: Tensor, rows: int, cols: int, *, parts: int = 1, turns: bool = False) -> Tensor:
    """Swizzle codes [E, R, C / 2] to the library's [E, rows / 4, 2 cols]."""

    def step(given: Tensor, target: Tensor) -> None:
        target.copy_(swizzled_weights(_padded(given, rows, cols // 2, parts, turns)))

    return by_experts(step, w, w.new_empty(w.shape[0], rows // 4, 2 * cols))


def _swizzled_scale(scale: Tensor, rows: int, cols: int, *, parts: int = 1, turns: bool = False) -> Tensor:
    warps = _warps(rows)
    wide = _padded(scale, rows, round_up(cols, STEP) // GROUP, parts, turns)
    return swizzled_scales(pad_matrices(wide, round_up(rows, 32 * warps), wide.shape[2]), warps)


def _padded(tensor: Tensor, rows: int, width: int, parts: int, turns: bool) -> Tensor:
    """Zero-pad ``parts`` stacked matrices to [E, rows, width]; ``turns`` interleaves rows."""
    wide = pad_matrices(tensor, rows // parts, width, parts=parts)
    return interleave_halves(wide) if turns else wide
