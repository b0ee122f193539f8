"""FlashInfer's TRTLLM kernels on the sm_100 family, for all weight formats.

One call of the library computes everything from x to the weighted sum, including the routing unless it is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_core.interface.claims import Claims
from moe_core.kernels.libraries.flashinfer import FlashInferExperts, is_aligned
from moe_core.spec.activation import MoEActivation
from moe_core.spec.device import cuda
from moe_core.spec.weights import KernelWeights
from moe_core.spec.workspace import WorkspaceSpec

_GATED = frozenset({MoEActivation.SILU, MoEActivation.SWIGLUOAI})


def trtllm_claims(*notes: str, **own: Any) -> Claims:
    """Return the claims shared by all adapters, extended by an adapter's own.

    Args:
        *notes: Notes that follow the shared ones.
        **own: Fields of the adapter; ``keys`` and ``requires`` are mandatory.

    Returns:
        The claims.
    """
    fields = {
        "devices": (cuda(min=100, max=109),),
        "activations": _GATED,
        "activation_limit": _GATED,
        "dtypes": frozenset({torch.bfloat16}),
        "max_top_k": 32,
        "allocates": True,
        "keeps_nan": False,
    }
    checked = "calls are bound against FlashInfer's signatures, and layouts compared with its helpers"
    return Claims(**{**fields, **own}, notes="; ".join((checked, *notes)))


class TrtLlmExperts(FlashInferExperts):
    """Base of adapters: the call, its inputs and its output.

    A class of `moe_core.kernels.libraries.trtllm_routing` precedes it in the bases. That class determines where the
    routing is computed, and thereby which function is called.
    """

    #: common prefix of the library's functions, without the suffix that depends on the routing
    function: ClassVar[str]
    #: number of groups to pass to the library for a routing without groups
    ungrouped: ClassVar[int | None] = None

    def workspaces(self, num_tokens: int) -> tuple[WorkspaceSpec, ...]:
        config = self.config
        return (
            WorkspaceSpec("x", (num_tokens * self.hidden_size,), config.dtype),
            WorkspaceSpec("y", (num_tokens * config.hidden_size,), config.dtype),
        )

    def library_input(
        self, hidden_states: Tensor, weights: KernelWeights, workspace: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Prepare x for the library, padded with zeros from column K.

        Args:
            hidden_states: Hidden states [M, K].
            weights: Weights of the layer.
            workspace: Tensors of :meth:`workspaces`, by name.

        Returns:
            The library's argument ``hidden_states``, and related arguments.
        """
        (tokens, columns), hidden = hidden_states.shape, self.hidden_size
        if hidden == columns and is_aligned(hidden_states):
            return {"hidden_states": hidden_states}
        x = workspace["x"][: tokens * hidden].view(tokens, hidden)
        x[:, :columns].copy_(hidden_states)
        x[:, columns:].zero_()
        return {"hidden_states": x}

    def library_output(self, output: Tensor, workspace: Mapping[str, Tensor]) -> Tensor:
        """Return the tensor the library writes: the output, or a workspace if unaligned.

        The first K columns are kept if the tensor has more.

        Args:
            output: Output [M, K].
            workspace: Tensors of :meth:`workspaces`, by name.

        Returns:
            The tensor to pass to the library.
        """
        return output if is_aligned(output) else workspace["y"][: output.numel()].view(output.shape)

    def weight_arguments(self, weights: KernelWeights) -> dict[str, Any]:
        """Return weights, scales and activation by the library's argument names.

        Args:
            weights: Weights of the layer.

        Returns:
            Keyword arguments.
        """
        raise NotImplementedError

    def arguments(
        self, output: Tensor, inputs: dict[str, Any], weights: KernelWeights, routing: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the arguments of the library's function, without reading values or needing a GPU.

        Args:
            output: Tensor that the library writes.
            inputs: Arguments of :meth:`library_input`.
            weights: Weights of the layer.
            routing: Arguments of the routing.

        Returns:
            Keyword arguments.
        """
        return {
            **inputs,
            **self.weight_arguments(weights),
            **routing,
            "intermediate_size": self.intermediate_size,
            "output": output,
        }

    def call(
        self,
        name: str,
        output: Tensor,
        hidden_states: Tensor,
        weights: KernelWeights,
        routing: dict[str, Any],
        workspace: Mapping[str, Tensor],
    ) -> None:
        """Call a function of the library, with hidden states and output at any alignment.

        Args:
            name: Name of the function.
            output: Output [M, K].
            hidden_states: Hidden states [M, K].
            weights: Weights of the layer.
            routing: Arguments of the routing.
            workspace: Tensors of :meth:`workspaces`, by name.
        """
        target = self.library_output(output, workspace)
        inputs = self.library_input(hidden_states, weights, workspace)
        getattr(self.library(), name)(**self.arguments(target, inputs, weights, routing))
        if target is not output:
            output.copy_(target[:, : output.shape[1]])
