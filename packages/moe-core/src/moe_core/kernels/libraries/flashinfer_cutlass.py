"""FlashInfer's `cutlass_fused_moe`: code shared by the adapters of all weight formats.

One call of the library computes everything from x to the weighted sum. w13 contains up rows, then gate rows, and so do
its scales and biases. Ids are converted to local expert numbers before the call (-1 for none, which the library skips),
so any expert map works. The sum over top-k uses the library's deterministic implementation, not the one with atomics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_core.interface.claims import Claims
from moe_core.interface.experts import ExpertTokensMetadata, FusedMoEExpertsModular
from moe_core.kernels.libraries.flashinfer import ACTIVATION_TYPES, FlashInferExperts, is_aligned
from moe_core.kernels.ops.layout import pad_matrices, swap_halves
from moe_core.spec.activation import MoEActivation
from moe_core.spec.device import cuda
from moe_core.spec.weights import KernelWeights, MoEWeights
from moe_core.spec.workspace import WorkspaceSpec

#: notes on the library for users
_NOTES = (
    "FlashInfer compiles its kernels when they are first used, and takes its first tile for every call "
    "(up to 7 times slower) unless one has run inside flashinfer.autotuner.autotune()"
)


def cutlass_claims(notes: str, **own: Any) -> Claims:
    """Return the claims shared by all adapters, extended by an adapter's own.

    Args:
        notes: Notes that precede those on the library.
        **own: Fields of the adapter; ``keys`` and ``requires`` are mandatory.

    Returns:
        The claims.
    """
    fields = {
        "devices": (cuda(min=90, max=90), cuda(min=100, max=109), cuda(min=120, max=129)),
        "activations": frozenset(ACTIVATION_TYPES),
        "activation_limit": frozenset({MoEActivation.SILU, MoEActivation.SWIGLUOAI, MoEActivation.SWIGLUSTEP}),
        "dtypes": frozenset({torch.bfloat16}),
        "bias": True,
        "rounds_products": True,
        "allocates": True,
        "keeps_nan": False,
    }
    return Claims(**{**fields, **own}, notes=f"{notes}; {_NOTES}")


class FlashInferCutlassExperts(FlashInferExperts, FusedMoEExpertsModular):
    """Base of adapters: the call, its workspaces, activation and biases."""

    #: dtype of the weights as the library sees them
    weight_dtype: ClassVar[torch.dtype] = torch.float8_e4m3fn
    #: whether the library's workspace size depends on what else has run in the process
    sizes_change: ClassVar[bool] = False

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._library_bytes: dict[int, int] = {}

    @property
    def options(self) -> dict[str, Any]:
        """Options that affect the size of the library's workspace, and the call."""
        return {"activation_type": self.activation_type, "use_fused_finalize": False}

    @property
    def input_dtype(self) -> torch.dtype:
        """Dtype in which the library takes x."""
        return self.config.dtype

    def activation_parameters(self, experts: int, device: torch.device) -> dict[str, Tensor]:
        """Create the per-expert parameters of the activation.

        Args:
            experts: Number of experts.
            device: Device of the tensors.

        Returns:
            Tensors [E] float32 by the library's names.
        """
        activation, params = self.config.activation, self.config.params
        wanted = {"swiglu_limit": params.limit}
        if activation is MoEActivation.SWIGLUOAI:
            wanted |= {"swiglu_alpha": params.alpha, "swiglu_beta": params.beta}
        return {
            name: torch.full((experts,), value, dtype=torch.float32, device=device)
            for name, value in wanted.items()
            if value is not None
        }

    def library_bytes(self, num_tokens: int) -> int:
        """Return the size of the library's workspace, as the library reports it now.

        Args:
            num_tokens: Number of tokens.

        Returns:
            Size in bytes.
        """
        config, known = self.config, self._library_bytes.get(num_tokens)
        if not num_tokens:
            return 0
        if known is not None:
            return known
        size: int = self.library().cutlass_fused_moe_workspace_size(
            num_tokens,
            self.hidden_size,
            self.intermediate_size,
            config.local_experts,
            config.top_k,
            x_dtype=self.input_dtype,
            weight_dtype=self.weight_dtype,
            output_dtype=config.dtype,
            **self.options,
        )
        if not self.sizes_change:
            self._library_bytes[num_tokens] = size
        return size

    def workspaces(self, num_tokens: int) -> tuple[WorkspaceSpec, ...]:
        padded = num_tokens * self.hidden_size if self.hidden_size != self.config.hidden_size else 0
        return (
            WorkspaceSpec("ids", (num_tokens, self.config.top_k), torch.int32),
            WorkspaceSpec("library", (self.library_bytes(num_tokens),), torch.uint8),
            WorkspaceSpec("y", (padded,), self.config.dtype),
        )

    def library_input(
        self, hidden_states: Tensor, weights: KernelWeights, workspace: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Prepare x for the library.

        Args:
            hidden_states: Hidden states [M, K].
            weights: Weights of the layer.
            workspace: Tensors of :meth:`workspaces`, by name.

        Returns:
            The library's argument ``input``, and related arguments.
        """
        if is_aligned(hidden_states):
            return {"input": hidden_states}
        return {"input": hidden_states.clone(memory_format=torch.contiguous_format)}

    def library_output(self, output: Tensor, workspace: Mapping[str, Tensor]) -> Tensor:
        """Return the tensor the library writes: the output, unless it is unaligned or too narrow.

        Args:
            output: Output [M, K].
            workspace: Tensors of :meth:`workspaces`, by name.

        Returns:
            The tensor to pass to the library.
        """
        if self.hidden_size != self.config.hidden_size:
            return workspace["y"][: output.shape[0] * self.hidden_size].view(-1, self.hidden_size)
        return output if is_aligned(output) else torch.empty_like(output)

    def requantized(self, weights: MoEWeights) -> MoEWeights:
        """Round the biases to the output's dtype, as the library takes them.

        Args:
            weights: Canonical weights.

        Returns:
            Weights with rounded biases.
        """
        first, second, dtype = weights.w13_bias, weights.w2_bias, self.config.dtype
        if first is None or second is None:
            return weights
        return replace(weights, w13_bias=first.to(dtype).to(first.dtype), w2_bias=second.to(dtype).to(second.dtype))

    def quant_scales(self, weights: KernelWeights) -> list[Tensor]:
        """Return the list for the library's argument ``quant_scales``.

        Args:
            weights: Weights of the layer.

        Returns:
            The scales.
        """
        raise NotImplementedError

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
        from moe_core.kernels.ops.align import local_ids

        tokens = hidden_states.shape[0]
        ids = workspace["ids"].flatten()[: topk_ids.numel()].view(tokens, -1)
        local_ids(topk_ids, self.config.local_experts, ids, expert_map=expert_map)
        target = self.library_output(output, workspace)
        self.library().cutlass_fused_moe(
            **self.arguments(
                target,
                self.library_input(hidden_states, weights, workspace),
                weights,
                topk_weights=topk_weights,
                local_ids=ids,
                library_workspace=workspace["library"],
            )
        )
        if target is not output:
            output.copy_(target[:, : self.config.hidden_size])

    def arguments(
        self,
        output: Tensor,
        inputs: dict[str, Any],
        weights: KernelWeights,
        *,
        topk_weights: Tensor,
        local_ids: Tensor,
        library_workspace: Tensor,
    ) -> dict[str, Any]:
        """Return the arguments of ``flashinfer.fused_moe.cutlass_fused_moe``.

        Reads no values and needs no GPU.

        Args:
            output: Tensor that the library writes.
            inputs: Arguments of :meth:`library_input`.
            weights: Weights of the layer.
            topk_weights: Router weights [M, k].
            local_ids: Local expert numbers [M, k]; -1 for none.
            library_workspace: The library's workspace.

        Returns:
            Keyword arguments.
        """
        quant = weights.quant_config
        biases = {"fc1_expert_biases": quant.w1_bias, "fc2_expert_biases": quant.w2_bias} if quant.has_bias else {}
        return {
            **inputs,
            "token_selected_experts": local_ids,
            "token_final_scales": topk_weights,
            "fc1_expert_weights": weights.w13.view(self.weight_dtype),
            "fc2_expert_weights": weights.w2.view(self.weight_dtype),
            "output_dtype": output.dtype,
            "quant_scales": self.quant_scales(weights),
            "output": output,
            "workspace_buffer": library_workspace,
            **biases,
            **{name: tensor for name, tensor in weights.extra.items() if name.startswith("swiglu_")},
            **self.options,
        }

    def bias_options(self, weights: MoEWeights) -> dict[str, Any]:
        """Return the biases in the output's dtype, padded; that of w13 as up rows, then gate rows.

        Args:
            weights: Canonical weights.

        Returns:
            ``w1_bias`` and ``w2_bias``; empty without biases.
        """
        if weights.w13_bias is None or weights.w2_bias is None:
            return {}
        parts = 2 if self.config.is_gated else 1
        first = _padded(weights.w13_bias.to(self.config.dtype), self.intermediate_size, parts)
        return {
            "w1_bias": swap_halves(first) if parts == 2 else first,
            "w2_bias": _padded(weights.w2_bias.to(self.config.dtype), self.hidden_size, 1),
        }


def _padded(bias: Tensor, rows: int, parts: int) -> Tensor:
    return pad_matrices(bias.unsqueeze(2), rows, 1, parts=parts).squeeze(2)
