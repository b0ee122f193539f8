"""Description of a fused MoE layer, without its weights.

The configuration dataclasses are frozen and hashable, and ``eval(repr(config))`` gives an equal object. Enums, dtypes
and routing methods may be passed by name ("batched", "bfloat16", "Renormalize").
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import torch

from moe_core.errors import ConfigError, did_you_mean
from moe_core.spec.activation import ActivationParams, MoEActivation
from moe_core.spec.routing import RoutingConfig, RoutingMethodType


class FusedMoEActivationFormat(str, Enum):
    """Layout of the hidden states that reach the experts.

    Attributes:
        STANDARD: ``[M, K]`` with ``topk_ids [M, k]``.
        BATCHED: ``[E_local, T_max, K]`` with ``expert_num_tokens [E_local]``.
    """

    STANDARD = "standard"
    BATCHED = "batched"

    def __repr__(self) -> str:
        return str(self)

    @staticmethod
    def parse(name: object) -> FusedMoEActivationFormat:
        """Look up an activation format by name.

        Args:
            name: A value of this enum ("standard", "batched") in any case, or a member.

        Returns:
            The format.

        Raises:
            ConfigError: ``name`` is unknown.
        """
        try:
            return FusedMoEActivationFormat(name.lower() if isinstance(name, str) else name)
        except ValueError:
            known = [item.value for item in FusedMoEActivationFormat]
            raise ConfigError(
                f"activation_format is {name!r}{did_you_mean(name, known)}, expected {' or '.join(known)}"
            ) from None


#: Dtypes of hidden states, keyed by the names that users pass.
_DTYPES = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
    "float32": torch.float32,
    "fp32": torch.float32,
}


def as_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Convert a dtype of hidden states, given as such or by name, to a ``torch.dtype``.

    Args:
        dtype: bfloat16, float16 or float32, or a name ("bfloat16", "bf16", "torch.bfloat16").

    Returns:
        The dtype.

    Raises:
        ConfigError: ``dtype`` is not one of these.
    """
    if isinstance(dtype, str):
        dtype = _DTYPES.get(dtype.lower().removeprefix("torch."), dtype)
    if not (isinstance(dtype, torch.dtype) and dtype in _DTYPES.values()):
        raise ConfigError(f"dtype must be bfloat16, float16 or float32, got {dtype!r}")
    return dtype


#: Largest size: kernels hold sizes in signed 32-bit integers.
LARGEST = 2**31 - 1


def whole_number(name: str, value: object, least: int = 1) -> int:
    """Convert ``value`` to a plain integer from ``least`` to :data:`LARGEST`.

    Args:
        name: Name of the argument, for the message.
        value: The value to convert.
        least: Smallest valid value.

    Returns:
        The integer.

    Raises:
        ConfigError: ``value`` is out of range or not an integer; bools and floats are rejected too.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or not least <= number <= LARGEST:
        kind = "a positive integer" if least == 1 else "an integer of 0 or more"
        most = f" of at most {LARGEST}" if number is not None and number > LARGEST else ""
        raise ConfigError(f"{name} must be {kind}{most}, got {value!r}")
    return number


class TokenSharing(str, Enum):
    """Which ranks of a layer hold the same input tokens.

    Attributes:
        ALL: All ranks of the layer.
        EP_RANK: The tensor-parallel ranks of one expert-parallel rank.
        NONE: No ranks; each has different tokens.
    """

    ALL = "all"
    EP_RANK = "ep_rank"
    NONE = "none"


@dataclass(frozen=True)
class FusedMoEParallelConfig:
    """Distribution of one MoE layer over ranks.

    The layer has ``tp_size * ep_size`` ranks, ordered by ``ep_rank * tp_size + tp_rank``.

    Attributes:
        tp_size: Number of tensor-parallel shards of the intermediate size.
        tp_rank: Tensor-parallel rank of this process.
        dp_size: Number of different token batches.
        dp_rank: Index of the batch of this rank.
        ep_size: Number of ranks that the experts are distributed over.
        ep_rank: Expert-parallel rank of this process.
        all2all_backend: ``name`` of the prepare/finalize class that moves tokens between ranks.
    """

    tp_size: int = 1
    tp_rank: int = 0
    dp_size: int = 1
    dp_rank: int = 0
    ep_size: int = 1
    ep_rank: int = 0
    all2all_backend: str = "allgather_reducescatter"

    def __post_init__(self) -> None:
        for name in ("tp", "dp", "ep"):
            size = whole_number(f"{name}_size", getattr(self, f"{name}_size"))
            rank = whole_number(f"{name}_rank", getattr(self, f"{name}_rank"), 0)
            if rank >= size:
                raise ConfigError(f"{name}_rank {rank} is not a rank of {name}_size {size}")
        if not isinstance(self.all2all_backend, str):
            raise ConfigError(f"all2all_backend is {self.all2all_backend!r}, expected a name, such as 'alltoall'")

    @staticmethod
    def make_no_parallel() -> FusedMoEParallelConfig:
        """Make the config of a layer on a single rank."""
        return FusedMoEParallelConfig()

    @property
    def use_ep(self) -> bool:
        """Whether experts are distributed over several ranks."""
        return self.ep_size > 1

    @property
    def use_all2all_kernels(self) -> bool:
        """Whether tokens cross ranks before and after the experts.

        They do if ranks that share experts, or columns of one expert, have different tokens.
        """
        return self.world_size > 1 and self.dp_size > 1

    @property
    def world_size(self) -> int:
        """Number of ranks of the layer."""
        return self.tp_size * self.ep_size

    @property
    def rank(self) -> int:
        """Index of this rank within the layer."""
        return self.ep_rank * self.tp_size + self.tp_rank

    @property
    def token_sharing(self) -> TokenSharing:
        """Which ranks hold the same input tokens.

        Raises:
            ConfigError: ``dp_size`` or ``dp_rank`` does not correspond to any :class:`TokenSharing` mode.
        """
        known = {
            self.world_size: (TokenSharing.NONE, self.rank),
            self.ep_size: (TokenSharing.EP_RANK if self.tp_size > 1 else TokenSharing.NONE, self.ep_rank),
            1: (TokenSharing.ALL, 0),
        }
        if self.dp_size not in known:
            sizes = " or ".join(map(str, sorted(known)))
            raise ConfigError(
                f"dp_size is {self.dp_size}, expected {sizes}: the {self.world_size} ranks of the layer share one "
                "batch of tokens, or have one per expert-parallel rank, or one each"
            )
        sharing, rank = known[self.dp_size]
        if self.dp_rank != rank:
            raise ConfigError(
                f"dp_rank is {self.dp_rank}, expected {rank} for ep_rank {self.ep_rank} and tp_rank {self.tp_rank} "
                f"with dp_size {self.dp_size}"
            )
        return sharing

    @staticmethod
    def of_rank(
        rank: int,
        *,
        tp_size: int = 1,
        ep_size: int = 1,
        dp_size: int = 1,
        all2all_backend: str = "allgather_reducescatter",
    ) -> FusedMoEParallelConfig:
        """Make the config of one rank from its index within the layer.

        Args:
            rank: Index from 0 to ``tp_size * ep_size - 1``.
            tp_size: Number of tensor-parallel shards.
            ep_size: Number of expert-parallel ranks.
            dp_size: Number of different token batches.
            all2all_backend: ``name`` of the prepare/finalize class that moves tokens between ranks.

        Returns:
            The config of that rank.

        Raises:
            ConfigError: A size or the rank is invalid.
        """
        sizes = whole_number("tp_size", tp_size), whole_number("ep_size", ep_size)
        dp_size = whole_number("dp_size", dp_size)
        rank = whole_number("rank", rank, 0)
        if rank >= sizes[0] * sizes[1]:
            raise ConfigError(f"rank {rank} is not a rank of a layer with tp_size {tp_size} and ep_size {ep_size}")
        ep_rank, tp_rank = divmod(rank, sizes[0])
        dp_rank = 0 if dp_size == 1 else ep_rank if dp_size == ep_size else rank
        return FusedMoEParallelConfig(
            tp_size, tp_rank, dp_size, min(dp_rank, dp_size - 1), ep_size, ep_rank, all2all_backend
        )


@dataclass(frozen=True)
class FusedMoEConfig:
    """Configuration of one MoE layer.

    Attributes:
        num_experts: Number of experts E over all ranks.
        top_k: Number of experts per token.
        hidden_size: Hidden size K, on this rank.
        intermediate_size: Intermediate size N per expert, on this rank.
        activation: Activation between the two matrix products, or its name.
        dtype: Dtype of hidden states and output.
        num_local_experts: Number of experts on this rank; default ``num_experts / ep_size``.
        activation_params: Alpha, beta and clamp limit; default: those of the activation.
        routing: How router logits become expert weights. Required if the layer or a monolithic kernel does the
            routing.
        parallel: Distribution of the layer over ranks.
        has_bias: Whether w13 and w2 have biases ``[E, 2N]`` and ``[E, K]``.
        apply_router_weight_on_input: Multiply x by the router weight instead of the expert's output; requires
            ``top_k`` 1.
        activation_format: Layout of the hidden states that prepare passes to the experts.
        max_num_tokens: Maximum number of tokens per rank in the batched format.
        is_lora_enabled: Select only backends that claim LoRA support.
        batch_invariant: Select only backends that claim batch invariance.
        max_loras: Maximum number of adapters present at the same time, with ``is_lora_enabled``.
        max_lora_rank: Maximum rank of an adapter, with ``is_lora_enabled``.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    activation: MoEActivation = MoEActivation.SILU
    dtype: torch.dtype = torch.bfloat16
    num_local_experts: int | None = None
    activation_params: ActivationParams | None = None
    routing: RoutingConfig | None = None
    parallel: FusedMoEParallelConfig = field(default_factory=FusedMoEParallelConfig)
    has_bias: bool = False
    apply_router_weight_on_input: bool = False
    activation_format: FusedMoEActivationFormat = FusedMoEActivationFormat.STANDARD
    max_num_tokens: int | None = None
    is_lora_enabled: bool = False
    batch_invariant: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16

    if TYPE_CHECKING:  # Declares the fields, some of which accept names.

        def __init__(
            self,
            num_experts: int,
            top_k: int,
            hidden_size: int,
            intermediate_size: int,
            activation: MoEActivation | str = ...,
            dtype: torch.dtype | str = ...,
            num_local_experts: int | None = ...,
            activation_params: ActivationParams | None = ...,
            routing: RoutingConfig | RoutingMethodType | str | None = ...,
            parallel: FusedMoEParallelConfig = ...,
            has_bias: bool = ...,
            apply_router_weight_on_input: bool = ...,
            activation_format: FusedMoEActivationFormat | str = ...,
            max_num_tokens: int | None = ...,
            is_lora_enabled: bool = ...,
            batch_invariant: bool = ...,
            max_loras: int = ...,
            max_lora_rank: int = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "hidden_size", "intermediate_size", "max_loras", "max_lora_rank"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        for name in ("num_local_experts", "max_num_tokens"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        for name in ("has_bias", "apply_router_weight_on_input", "is_lora_enabled", "batch_invariant"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.top_k > self.num_experts:
            raise ConfigError(f"top_k {self.top_k} is larger than num_experts {self.num_experts}")
        if not isinstance(self.activation, MoEActivation):
            object.__setattr__(self, "activation", MoEActivation.parse(self.activation))
        object.__setattr__(self, "dtype", as_dtype(self.dtype))
        object.__setattr__(self, "activation_format", FusedMoEActivationFormat.parse(self.activation_format))
        if isinstance(self.routing, str | RoutingMethodType):
            object.__setattr__(self, "routing", RoutingConfig.from_method(self.routing))
        for name, kind in (
            ("routing", RoutingConfig),
            ("activation_params", ActivationParams),
            ("parallel", FusedMoEParallelConfig),
        ):
            value = getattr(self, name)
            if not isinstance(value, kind) and (value is not None or name == "parallel"):
                raise ConfigError(f"{name} must be a {kind.__name__}, got {value!r}")
        if self.num_local_experts is None:
            if self.num_experts % self.parallel.ep_size:
                raise ConfigError(
                    f"num_experts {self.num_experts} does not divide by ep_size {self.parallel.ep_size}; "
                    "give num_local_experts"
                )
            object.__setattr__(self, "num_local_experts", self.num_experts // self.parallel.ep_size)
        if not 1 <= self.local_experts <= self.num_experts:
            raise ConfigError(f"num_local_experts {self.num_local_experts} is not within 1..{self.num_experts}")
        if self.apply_router_weight_on_input and self.top_k != 1:
            raise ConfigError(
                f"apply_router_weight_on_input needs top_k 1, got {self.top_k}: "
                "one input cannot carry several experts' weights"
            )

    @property
    def local_experts(self) -> int:
        """Number of experts whose weights this rank holds."""
        return self.num_local_experts if self.num_local_experts is not None else self.num_experts

    @property
    def is_gated(self) -> bool:
        """Whether the activation is gated."""
        return self.activation.is_gated

    @property
    def params(self) -> ActivationParams:
        """Activation parameters: the given ones, with the activation's defaults for the rest."""
        return self.activation.resolve_params(self.activation_params)

    @property
    def w13_rows(self) -> int:
        """Number of rows of w13: 2N for a gated activation, else N."""
        return self.intermediate_size * (2 if self.is_gated else 1)
