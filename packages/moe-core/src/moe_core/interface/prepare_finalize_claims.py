"""Declarative description of what a prepare/finalize class supports.

It corresponds to :mod:`moe_core.interface.claims`, which describes experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from moe_core.errors import ConfigError
from moe_core.interface.claims import dtype_reason
from moe_core.spec.config import FusedMoEConfig, TokenSharing
from moe_core.spec.device import DeviceInfo, DeviceRange
from moe_core.spec.environment import Environment, Requirement

_SHARING = {
    TokenSharing.ALL: "with the same tokens on all ranks (dp_size 1)",
    TokenSharing.EP_RANK: "with the same tokens on the tensor-parallel ranks of an expert-parallel rank "
    "(dp_size = ep_size)",
    TokenSharing.NONE: "with tokens of each rank's own (dp_size = tp_size * ep_size)",
}


@dataclass(frozen=True)
class PrepareFinalizeClaims:
    """Declaration of what one prepare/finalize class supports.

    Attributes:
        sharing: Which ranks may have the same tokens.
        devices: Supported devices; any of these ranges.
        dtypes: Dtypes of hidden states.
        quantizes: Tokens are quantized before dispatch if the experts accept it.
        replicas: Placements with experts on several ranks are supported.
        batch_invariant: Partial sums of ranks are added in an order that does not depend on other tokens, if the
            config requires it. Never with replicas, because the position of a token in the batch selects one.
        uneven: Ranks may have different numbers of tokens, including none.
        cuda_graph: Calls may be captured in CUDA graphs (if the experts' may).
        bounded: Requires the config's ``max_num_tokens``.
        tensor_parallel: ``tp_size`` may be greater than 1.
        hidden_multiple: The hidden size must be a multiple of this.
        max_top_k: Largest top-k; 0 for no limit.
        max_ranks: Largest number of ranks; 0 for no limit.
        one_domain: Ranks write into each other's memory, so all GPUs must be in one peer-access domain (NVLink).
        requires: Required software.
        verified_on: Hardware on which the class was run.
        notes: Remarks for users.
    """

    sharing: frozenset[TokenSharing]
    devices: tuple[DeviceRange, ...] = (DeviceRange("any"),)
    dtypes: frozenset[torch.dtype] = frozenset({torch.bfloat16, torch.float16, torch.float32})
    quantizes: bool = False
    replicas: bool = True
    batch_invariant: bool = False
    uneven: bool = True
    cuda_graph: bool = True
    bounded: bool = False
    tensor_parallel: bool = True
    hidden_multiple: int = 1
    max_top_k: int = 0
    max_ranks: int = 0
    one_domain: bool = False
    requires: tuple[Requirement, ...] = ()
    verified_on: tuple[str, ...] = ()
    notes: str = field(default="", compare=False)

    def reasons_against(self, config: FusedMoEConfig, device: DeviceInfo, environment: Environment) -> list[str]:
        """List every reason why the claims do not cover a layer.

        Args:
            config: Configuration of the layer.
            device: The device.
            environment: Installed software.

        Returns:
            The reasons; empty if the layer is covered.
        """
        reasons = []
        parallel = config.parallel
        against = [r.reason_against(device) for r in self.devices]
        if all(reason is not None for reason in against):
            reasons.append(f"needs {' or '.join(map(str, self.devices))}, device is {device}")
        reasons += [r for r in map(environment.reason_against, self.requires) if r is not None]
        try:
            sharing = parallel.token_sharing
        except ConfigError as error:
            reasons.append(error.message)
        else:
            if sharing not in self.sharing:
                reasons.append(f"does not work {_SHARING[sharing]}")
        if config.dtype not in self.dtypes:
            reasons.append(dtype_reason(config.dtype, self.dtypes))
        if parallel.tp_size > 1 and not self.tensor_parallel:
            reasons.append(f"does not work with tensor parallelism (tp_size {parallel.tp_size})")
        if config.batch_invariant and not self.batch_invariant:
            reasons.append("is not batch invariant: the order in which it adds partial sums depends on other tokens")
        if self.bounded and config.max_num_tokens is None:
            reasons.append("needs max_num_tokens in the config, the largest number of tokens per rank")
        if config.hidden_size % self.hidden_multiple:
            reasons.append(f"needs hidden_size to be a multiple of {self.hidden_multiple}, got {config.hidden_size}")
        if self.max_top_k and config.top_k > self.max_top_k:
            reasons.append(f"needs top_k <= {self.max_top_k}, got {config.top_k}")
        if self.max_ranks and parallel.world_size > self.max_ranks:
            reasons.append(f"needs at most {self.max_ranks} ranks, got {parallel.world_size}")
        return reasons
