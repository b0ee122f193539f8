"""What a prepare/finalize class can do, as data; in the manner of :mod:`moe_core.interface.claims`, which is about
experts."""

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
    """The declaration of one prepare/finalize class.

    - ``devices``: it runs on any of these
    - ``sharing``: which ranks may bring the same tokens
    - ``dtypes`` of hidden states
    - ``quantizes``: tokens are quantised before they travel, where the experts take them so
    - ``replicas``: takes placements in which experts are on several ranks
    - ``batch_invariant``: adds what ranks computed up in an order that other tokens don't change, where the config asks
      for that; never with replicas, of which a token's place in the batch chooses one
    - ``uneven``: ranks may bring different numbers of tokens, none too
    - ``cuda_graph``: may be captured (where the experts may)
    - ``bounded``: needs the config's ``max_num_tokens``
    - ``tensor_parallel``: ``tp_size`` may be more than 1
    - ``hidden_multiple``: the hidden size must divide by it; ``max_top_k``, ``max_ranks``: 0 for no limit
    - ``one_domain``: ranks write into each other's memory, so all are on GPUs where that can be (NVLink)
    - ``requires``: what must be installed
    - ``verified_on``: hardware on which it was run
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
        """Every reason why the claims do not cover the layer; empty if they do."""
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
            reasons.append("is not batch invariant: ranks are added up in an order that other tokens may change")
        if self.bounded and config.max_num_tokens is None:
            reasons.append("needs the config's max_num_tokens, the most tokens that a rank brings")
        if config.hidden_size % self.hidden_multiple:
            reasons.append(f"needs hidden_size to be a multiple of {self.hidden_multiple}, got {config.hidden_size}")
        if self.max_top_k and config.top_k > self.max_top_k:
            reasons.append(f"needs top_k <= {self.max_top_k}, got {config.top_k}")
        if self.max_ranks and parallel.world_size > self.max_ranks:
            reasons.append(f"needs at most {self.max_ranks} ranks, got {parallel.world_size}")
        return reasons
