"""FlashInfer's TRTLLM kernels on the sm_100 family: what their adapters share, whatever the weights are.

One call of the library does everything from x to the weighted sum, and the routing unless it is given.
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
    """What all adapters claim, and an adapter's ``own`` fields, of which ``keys`` and ``requires`` are needed.

    ``notes`` follow what is to be said of all.
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
    """Base of adapters: the call, and where it reads and writes.

    One of `moe_core.kernels.libraries.trtllm_routing` goes before it: whoever routes decides which function is called.
    """

    #: name of the library's functions, without what tells who routes
    function: ClassVar[str]
    #: groups that the library is told where a routing has none
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
        """x as the library takes it: its argument ``hidden_states``, zeros from column K, and what goes with it."""
        (tokens, columns), hidden = hidden_states.shape, self.hidden_size
        if hidden == columns and is_aligned(hidden_states):
            return {"hidden_states": hidden_states}
        x = workspace["x"][: tokens * hidden].view(tokens, hidden)
        x[:, :columns].copy_(hidden_states)
        x[:, columns:].zero_()
        return {"hidden_states": x}

    def library_output(self, output: Tensor, workspace: Mapping[str, Tensor]) -> Tensor:
        """Where the library writes: the output, unless it cannot; of more columns the first K are kept."""
        return output if is_aligned(output) else workspace["y"][: output.numel()].view(output.shape)

    def weight_arguments(self, weights: KernelWeights) -> dict[str, Any]:
        """Weights, scales and activation, by the library's names."""
        raise NotImplementedError

    def arguments(
        self, output: Tensor, inputs: dict[str, Any], weights: KernelWeights, routing: dict[str, Any]
    ) -> dict[str, Any]:
        """Arguments of the library's function; looks at no value and needs no GPU."""
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
        """Call ``name`` of the library, wherever hidden states and output [M, K] lie."""
        target = self.library_output(output, workspace)
        inputs = self.library_input(hidden_states, weights, workspace)
        getattr(self.library(), name)(**self.arguments(target, inputs, weights, routing))
        if target is not output:
            output.copy_(target[:, : output.shape[1]])
