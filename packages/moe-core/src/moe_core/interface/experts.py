"""The interface that every backend implements: the expert computation of a fused MoE.

A backend is one subclass in one file: what it claims, how it lays out weights, the
workspace it needs, and ``apply``.  Two kinds exist:

- *modular* experts get ``topk_weights`` and ``topk_ids``; something else routes.
- *monolithic* experts get router logits and route by themselves, by the configured method.

The contract of both:

- ``claims`` is the whole truth about support; what the claims cannot express goes into
  :meth:`FusedMoEExperts.extra_reasons`.  Nothing else decides whether a backend is taken.
- :meth:`FusedMoEExperts.convert` is pure: canonical weights in, kernel weights out, the input untouched.
- ``apply`` writes every element of ``output``, allocates nothing that :meth:`FusedMoEExperts.workspaces` could
  have named, doesn't synchronise with the host, and doesn't depend on what output or workspace held before.  Classes
  that are driven by the host (``cuda_graph=False``) may allocate and synchronise.
- ``config.apply_router_weight_on_input``: in the standard format the experts weight x (or, the same but for rounding,
  the first product before its bias) instead of their result; in the batched format prepare has done it.
- An id that is negative, at least E, or mapped outside 0..E_local-1 (-1 by convention) selects no expert: it
  contributes nothing, and no memory outside the weights is touched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moe_core.errors import TensorError
from moe_core.interface.backend_order import Placement
from moe_core.interface.claims import Claims
from moe_core.spec.config import FusedMoEActivationFormat, FusedMoEConfig
from moe_core.spec.device import DeviceInfo
from moe_core.spec.environment import Environment
from moe_core.spec.quant_key import QuantKey, check_one_level
from moe_core.spec.weights import KernelWeights, MoEWeights
from moe_core.spec.workspace import WorkspaceSpec


@dataclass(frozen=True, eq=False)
class ExpertTokensMetadata:
    """How many tokens the local experts have, where prepare knows it.

    - ``expert_num_tokens`` [E_local] int32: the rows in use of each; always given in the batched format
    - ``mean``: of all local experts, expected or known on the host, where a call's tokens were chosen because they have
      an expert here, so that these have more than tokens and top-k say; kernels are chosen by it
    """

    expert_num_tokens: Tensor | None = None
    mean: float | None = None

    @staticmethod
    def rows_in_use(given: ExpertTokensMetadata | None) -> Tensor:
        """``expert_num_tokens`` of a call in the batched format.  Raises TensorError where they are missing."""
        if given is None or given.expert_num_tokens is None:
            raise TensorError("expert_tokens is missing: the batched format needs the rows in use per expert")
        return given.expert_num_tokens


class FusedMoEExperts(ABC):
    """Base of modular and monolithic experts; see the module docstring.

    An instance belongs to one layer on one kind of device; it holds configuration, no weights.  Making one touches no
    device, so that weights can be converted for a GPU that is not here.
    """

    claims: ClassVar[Claims]
    is_monolithic: ClassVar[bool] = False
    #: where a backend of another package stands among the scheme's own
    placement: ClassVar[Placement] = Placement()
    #: ``apply`` does nothing on the device but launch kernels through `moe_core.kernels.launch.launch.launch`, with
    #: arguments that follow from the layer and from the shapes, strides and addresses of its tensors (see
    #: `moe_core.kernels.launch.replay`)
    launches_only: ClassVar[bool] = False

    @property
    def launch_key(self) -> Hashable | None:
        """What decides the launches of ``apply`` beside the tensors of a call and where the weights lie; None: unknown.

        With ``launches_only``, layers of equal keys whose weights lie alike share what was recorded of their launches.
        """
        return None

    def __init__(
        self,
        config: FusedMoEConfig,
        *,
        weight_key: QuantKey | None,
        activation_key: QuantKey | None,
        device: DeviceInfo | None = None,
    ) -> None:
        check_one_level(weight_key, "weight_key")
        check_one_level(activation_key, "activation_key")
        self.config = config
        self.weight_key = weight_key
        self.activation_key = activation_key
        self.device_info = device if device is not None else DeviceInfo.current()

    @property
    def takes_quantized(self) -> bool:
        """Whether :meth:`apply` of this layer takes hidden states that are quantised already, with their scales.

        They are where the claims say so, the activation key gives each token scales of its own
        (:attr:`moe_core.QuantKey.is_token_wise`), and nothing is to be done to tokens before they are quantised (LoRA,
        a router weight on the input, factors of the input's columns).
        """
        key, config = self.activation_key, self.config
        return (
            self.claims.takes_quantized
            and key is not None
            and key.is_token_wise
            and not (config.is_lora_enabled or config.apply_router_weight_on_input)
            and not (self.weight_key is not None and self.weight_key.pre_scaled)
        )

    @classmethod
    def extra_reasons(
        cls,
        config: FusedMoEConfig,
        weight_key: QuantKey | None,
        activation_key: QuantKey | None,
        device: DeviceInfo,
    ) -> list[str]:
        """Reasons against a request that ``claims`` cannot express (relations between sizes …)."""
        return []

    @classmethod
    def unsupported_reasons(
        cls,
        config: FusedMoEConfig,
        weight_key: QuantKey | None,
        activation_key: QuantKey | None,
        device: DeviceInfo,
        environment: Environment,
    ) -> list[str]:
        """Every reason why this class can't serve the request; empty if it can."""
        return [
            *cls.claims.reasons_against(config, weight_key, activation_key, device, environment),
            *cls.extra_reasons(config, weight_key, activation_key, device),
        ]

    @classmethod
    def is_supported_config(
        cls,
        config: FusedMoEConfig,
        weight_key: QuantKey | None,
        activation_key: QuantKey | None,
        *,
        device: DeviceInfo | None = None,
        environment: Environment | None = None,
    ) -> tuple[bool, str | None]:
        """(True, None), or (False, all reasons joined by "; ")."""
        reasons = cls.unsupported_reasons(
            config, weight_key, activation_key, device or DeviceInfo.current(), environment or Environment.current()
        )
        return (not reasons, "; ".join(reasons) or None)

    def requantized(self, weights: MoEWeights) -> MoEWeights:
        """The weights, and the activation key, that this backend computes with: those given, unless it cannot.

        A backend that needs coarser scales (or powers of two, also for activations) quantises anew here, says so in
        its claims' notes, and lets :meth:`convert` only move what this returns.  The conformance kit measures a result
        against it.
        """
        return weights

    def break_ties(self, x: Tensor) -> Tensor:
        """Hidden states [M, K] as this backend's quantiser sees them: those given, unless it breaks ties its own way.

        A library that multiplies by the reciprocal of a float32 scale rounds values halfway between two codes
        to one side; here they are moved there, by at most 2**-20 of themselves.  The conformance kit measures a result
        against the hidden states that this returns.
        """
        return x

    @abstractmethod
    def convert(self, weights: MoEWeights) -> KernelWeights:
        """Canonical weights in the layout that this backend wants on ``device_info``.

        Tensors whose layout stays are passed through, not copied.
        """

    def launch_choice(self, num_tokens: int) -> Hashable:
        """What experts whose ``apply`` launches only choose for ``num_tokens`` tokens, found without a device.

        Between numbers of tokens with the same choice, launches differ by thresholds alone (see
        :mod:`moe_core.runtime.call_launches`); what warms up asks it for every number.
        """
        return None

    def workspaces(self, num_tokens: int) -> tuple[WorkspaceSpec, ...]:
        """Scratch tensors that ``apply`` needs for at most ``num_tokens`` tokens."""
        return ()


class FusedMoEExpertsModular(FusedMoEExperts):
    """Experts that get ``topk_weights`` and ``topk_ids`` [M, k]: routing is done before the call."""

    @abstractmethod
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
        """Run the experts.

        - ``output`` [M, K] in the config's dtype where the claims say ``reduces``; else [M, k, K], unweighted.
          Batched format: [E_local, T_max, K], unweighted.
        - ``hidden_states`` [M, K] (batched: [E_local, T_max, K]); quantised, with
          ``hidden_states_scale``, unless the claims say ``expects_unquantized_inputs``; either way where
          :attr:`takes_quantized`
        - ``topk_weights`` [M, k] float32; ``topk_ids`` [M, k] int32 or int64, global expert ids
        - all of these contiguous, the columns of ``hidden_states`` too (its rows may lie apart)
        - ``expert_map`` [E] int32: local index of each global expert, -1 where it lives elsewhere
        - ``expert_tokens``: what is known of the tokens of local experts; always given in the batched format

        Experts that claim ``lora`` take a further keyword, ``lora: LoRA | None = None``: the adapters, and the number
        of each row's (:mod:`moe_core.spec.lora`).
        """

    @property
    def activation_format(self) -> FusedMoEActivationFormat:
        return self.config.activation_format


class FusedMoEExpertsMonolithic(FusedMoEExperts):
    """Experts that get router logits [M, E], and route by themselves as ``config.routing`` says."""

    is_monolithic = True

    @abstractmethod
    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        weights: KernelWeights,
        *,
        router_logits: Tensor,
        workspace: Mapping[str, Tensor],
        correction_bias: Tensor | None = None,
        expert_map: Tensor | None = None,
        hidden_states_scale: Tensor | None = None,
    ) -> None:
        """Route and run the experts: ``router_logits`` [M, E], ``correction_bias`` [E] float32."""


def output_shape(experts: FusedMoEExpertsModular, num_tokens: int) -> tuple[int, ...]:
    """Shape that modular experts of the standard format write for ``num_tokens`` tokens."""
    config = experts.config
    if experts.claims.reduces:
        return (num_tokens, config.hidden_size)
    return (num_tokens, config.top_k, config.hidden_size)


def scratch_dtype(config: FusedMoEConfig) -> torch.dtype:
    """dtype of intermediate values that are rounded once more before the output."""
    return torch.float32 if config.dtype is torch.float32 else config.dtype
