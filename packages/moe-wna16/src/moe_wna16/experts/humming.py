"""Humming: int4 and int8 weights with 16-bit activations, in kernels compiled per shape.

Humming computes the two grouped GEMMs. Sorting, activation and the top-k reduction are moe-core's:

    sort      pairs by expert, rows gathered            expert e: rows offsets[e] to offsets[e + 1]
    product   y = x w13^T                               h = act(y)
    product   y = h w2^T                                out[token] = sum over slots of weight * y

The library's heuristics choose among about sixty kernels per matrix, by the number of rows. A kernel is compiled, in
seconds, when a call first needs it. Before a CUDA graph is captured, run one call of every size that it contains.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from moe_core import (
    GATED,
    NON_GATED,
    TRITON,
    Claims,
    ConfigError,
    DeviceInfo,
    ExpertTokensMetadata,
    FusedMoEConfig,
    FusedMoEExpertsModular,
    KernelWeights,
    KeyPattern,
    MoEWeights,
    QuantKey,
    WorkspaceSpec,
    cuda,
)
from moe_core.api.libraries import fused_activation, gather_rows, reduce_pairs, sort_pairs, sort_workspaces
from torch import Tensor

from moe_wna16.keys import BASES, GROUPS
from moe_wna16.libraries import HUMMING
from moe_wna16.libraries.humming_layout import ordered_scales, packed_bytes, packed_int4

_DTYPES = (torch.bfloat16, torch.float16)
#: tile height for sorting pairs: arbitrary, since the library splits experts into tiles itself
_TILE = 64
#: rows sorted by expert, contiguous, without padding
_GEMM = {"gemm_type": "grouped_contiguous"}
_COMPUTE = json.dumps(_GEMM)


class HummingWNA16Experts(FusedMoEExpertsModular):
    """int4 and int8, with or without zero points, in groups of 32, 64 or 128 columns or per row."""

    claims = Claims(
        devices=(cuda(min=80),),
        keys=tuple((KeyPattern(base, GROUPS, _DTYPES), None) for base in BASES),
        activations=GATED | NON_GATED,
        dtypes=frozenset(_DTYPES),
        hidden_multiple=128,
        intermediate_multiple=128,
        allocates=True,
        keeps_nan=False,
        requires=(HUMMING, TRITON),
        verified_on=("NVIDIA H200 (sm90)",),
        notes="kernels are compiled when a shape and a range of batch sizes are first used",
    )

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._chosen: dict[tuple[str, int], str] = {}

    @classmethod
    def extra_reasons(
        cls,
        config: FusedMoEConfig,
        weight_key: QuantKey | None,
        activation_key: QuantKey | None,
        device: DeviceInfo,
    ) -> list[str]:
        if weight_key is not None and weight_key.scale.dtype in _DTYPES and weight_key.scale.dtype != config.dtype:
            return [f"reads scales of the hidden states' dtype {config.dtype}, got {weight_key.scale.dtype}"]
        return []

    @staticmethod
    def library() -> Any:
        """Return the library's functions, imported on first use."""
        HUMMING.load()
        return SimpleNamespace(
            LayerConfig=importlib.import_module("humming.config").LayerConfig,
            get_heuristics_config=importlib.import_module("humming.tune").get_heuristics_config,
            humming_forward=importlib.import_module("humming.forward").humming_forward,
        )

    def convert(self, weights: MoEWeights) -> KernelWeights:
        w13_scale, w2_scale = weights.weight_scales
        whole_rows = self._key.group_size == -1
        return KernelWeights(
            w13=self._packed(weights.w13),
            w2=self._packed(weights.w2),
            quant_config=weights.quant_config(
                w1_scale=ordered_scales(w13_scale, whole_rows=whole_rows),
                w2_scale=ordered_scales(w2_scale, whole_rows=whole_rows),
                w1_zp=self._zero_points(weights.w13_zero_point),
                w2_zp=self._zero_points(weights.w2_zero_point),
            ),
        )

    def _packed(self, w: Tensor) -> Tensor:
        if self._key.packing is not None:
            return packed_int4(w)
        # codes are relative to a common zero point
        return packed_bytes(w, distances=self._key.symmetric and self.config.dtype is torch.bfloat16)

    def _zero_points(self, zero_point: Tensor | None) -> Tensor | None:
        """Convert zero points to the hidden states' dtype, exact for 8-bit codes and 256."""
        return None if zero_point is None else ordered_scales(zero_point.to(self.config.dtype), whole_rows=False)

    @property
    def _key(self) -> QuantKey:
        if self.weight_key is None:
            raise ConfigError(f"{type(self).__name__} needs quantized weights, but weight_key is None")
        return self.weight_key

    def layer_arguments(self, rows: int, cols: int) -> dict[str, Any]:
        """Return the arguments of ``humming.config.LayerConfig``.

        Args:
            rows: rows of each expert's matrix.
            cols: columns of each expert's matrix.
        """
        dtype = str(self.config.dtype).removeprefix("torch.")
        return {
            "sm_version": self.device_info.capability,
            "shape_n": rows,
            "shape_k": cols,
            "num_experts": self.config.local_experts,
            "a_dtype": dtype,
            "b_dtype": f"uint{self._key.dtype.bits}",
            "bs_dtype": dtype,
            "c_dtype": dtype,
            "weight_scale_group_size": max(self._key.group_size, 0),
            "has_zero_point": not self._key.symmetric,
            "is_fp_zero_point": not self._key.symmetric,
        }

    def arguments(self, name: str, a: Tensor, weights: KernelWeights, out: Tensor, offsets: Tensor) -> dict[str, Any]:
        """Return the arguments of ``humming.forward.humming_forward`` except its configurations.

        Reads no tensor values.

        Args:
            name: name of the matrix, "w13" or "w2".
            a: [R, columns of the matrix], rows by expert.
            weights: converted weights.
            out: [R, rows of the matrix].
            offsets: int32 [E + 1], first row of each expert.
        """
        weight, desc = (
            (weights.w13, weights.quant_config.w1) if name == "w13" else (weights.w2, weights.quant_config.w2)
        )
        return {
            "inputs": a,
            "weight": weight,
            "weight_scale": desc.scale,
            "zero_point": desc.zero_point,
            "outputs": out,
            "expert_layout": offsets,
        }

    @property
    def _shapes(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of each matrix."""
        config = self.config
        return {
            "w13": (config.w13_rows, config.hidden_size),
            "w2": (config.hidden_size, config.intermediate_size),
        }

    @functools.cached_property
    def _calls(self) -> Any:
        return self.library()

    @functools.cached_property
    def _layers(self) -> dict[str, Any]:
        """The library's configuration of each matrix."""
        return {name: self._calls.LayerConfig(**self.layer_arguments(*shape)) for name, shape in self._shapes.items()}

    def _settings(self, name: str, rows: int) -> str:
        """Return the kernel settings that the library's heuristics choose for about ``rows`` rows."""
        if (name, rows) not in self._chosen:
            chosen = self._calls.get_heuristics_config(self._layers[name], shape_m=rows, **_GEMM)
            # stream-K would reduce partial sums in 16 bits, in completion order
            self._chosen[name, rows] = json.dumps({**chosen, "use_stream_k": False})
        return self._chosen[name, rows]

    def product(self, name: str, a: Tensor, weights: KernelWeights, out: Tensor, offsets: Tensor) -> None:
        """Compute ``out`` = a w^T for rows grouped by expert.

        Args:
            name: name of the matrix, "w13" or "w2".
            a: [R, columns of the matrix], rows by expert.
            weights: converted weights.
            out: [R, rows of the matrix].
            offsets: int32 [E + 1], first row of each expert.
        """
        config = self.config
        # Only the device knows the number of valid rows; under expert parallelism it is about this fraction.
        expected = -(-a.shape[0] * config.local_experts // config.num_experts)
        self._calls.humming_forward(
            self._layers[name],
            **self.arguments(name, a, weights, out, offsets),
            compute_config=_COMPUTE,
            tuning_config=self._settings(name, expected),
        )

    def workspaces(self, num_tokens: int) -> tuple[WorkspaceSpec, ...]:
        config = self.config
        pairs = num_tokens * config.top_k
        hidden, inter = config.hidden_size, config.intermediate_size
        return (
            *sort_workspaces(pairs, config.local_experts, _TILE),
            WorkspaceSpec("a", (pairs * max(hidden, inter),), config.dtype),
            WorkspaceSpec("y", (pairs * max(config.w13_rows, hidden),), config.dtype),
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
        config, experts, pairs = self.config, self.config.local_experts, topk_ids.numel()
        order = sort_pairs(topk_ids, experts, _TILE, workspace=workspace, expert_map=expert_map, positions=True)
        offsets = order.offsets[: experts + 1]
        used = offsets[experts:]
        a = _matrix(workspace["a"], pairs, config.hidden_size)
        gather_rows(hidden_states, order.pairs[:pairs], per_row=config.top_k, count=used, out=a)
        y = _matrix(workspace["y"], pairs, config.w13_rows)
        self.product("w13", a, weights, y, offsets)
        h = _matrix(workspace["a"], pairs, config.intermediate_size)
        fused_activation(config.activation, y, params=config.params, row_counts=used, out=h)
        y = _matrix(workspace["y"], pairs, config.hidden_size)
        self.product("w2", h, weights, y, offsets)
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
