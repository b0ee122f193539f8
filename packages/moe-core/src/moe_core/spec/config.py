"""What a fused MoE layer is, apart from its weights.

Both dataclasses are frozen and hashable, and their ``repr`` evaluates back.  Enums, dtypes and routing methods may be
given by name ("batched", "bfloat16", "Renormalize").
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
    """How hidden states reach the experts.

    STANDARD: ``[M, K]`` with ``topk_ids [M, k]``.
    BATCHED: ``[E_local, T_max, K]`` with ``expert_num_tokens [E_local]``.
    """

    STANDARD = "standard"
    BATCHED = "batched"

    def __repr__(self) -> str:
        return str(self)

    @staticmethod
    def parse(name: object) -> FusedMoEActivationFormat:
        """The format of that name.  Raises ConfigError for another."""
        try:
            return FusedMoEActivationFormat(name.lower() if isinstance(name, str) else name)
        except ValueError:
            known = [item.value for item in FusedMoEActivationFormat]
            raise ConfigError(
                f"activation_format is {name!r}{did_you_mean(name, known)}, expected {' or '.join(known)}"
            ) from None


#: dtypes of hidden states, by what users call them
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
    """A dtype of hidden states, itself or by name ("bfloat16", "bf16", "torch.bfloat16").  Raises ConfigError."""
    if isinstance(dtype, str):
        dtype = _DTYPES.get(dtype.lower().removeprefix("torch."), dtype)
    if not (isinstance(dtype, torch.dtype) and dtype in _DTYPES.values()):
        raise ConfigError(f"dtype must be bfloat16, float16 or float32, got {dtype!r}")
    return dtype


#: sizes are numbers of 32 bits in kernels
LARGEST = 2**31 - 1


def whole_number(name: str, value: object, least: int = 1) -> int:
    """``value`` as a plain integer of at least ``least``; ConfigError for anything else, a bool or a float too."""
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
    """Which ranks of a layer bring the same tokens: ALL, those of an expert-parallel rank (EP_RANK), or NONE."""

    ALL = "all"
    EP_RANK = "ep_rank"
    NONE = "none"


@dataclass(frozen=True)
class FusedMoEParallelConfig:
    """How one MoE layer is spread over ranks.

    ``tp``: the intermediate size is cut; ``ep``: the experts are spread; ``dp``: how many different batches of tokens
    there are.  The layer has ``tp_size * ep_size`` ranks, in the order of ``ep_rank * tp_size + tp_rank``.
    ``all2all_backend`` names what moves tokens between them: the ``name`` of a prepare/finalize class.
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
        return FusedMoEParallelConfig()

    @property
    def use_ep(self) -> bool:
        return self.ep_size > 1

    @property
    def use_all2all_kernels(self) -> bool:
        """Whether tokens cross ranks before and after the experts: those that share experts, or columns of one, have
        different tokens.
        """
        return self.world_size > 1 and self.dp_size > 1

    @property
    def world_size(self) -> int:
        """Ranks of the layer."""
        return self.tp_size * self.ep_size

    @property
    def rank(self) -> int:
        """This rank's number among those of the layer."""
        return self.ep_rank * self.tp_size + self.tp_rank

    @property
    def token_sharing(self) -> TokenSharing:
        """Which ranks bring the same tokens.  Raises ConfigError for a ``dp_size`` or ``dp_rank`` that means none."""
        known = {
            self.world_size: (TokenSharing.NONE, self.rank),
            self.ep_size: (TokenSharing.EP_RANK if self.tp_size > 1 else TokenSharing.NONE, self.ep_rank),
            1: (TokenSharing.ALL, 0),
        }
        if self.dp_size not in known:
            sizes = " or ".join(map(str, sorted(known)))
            raise ConfigError(
                f"dp_size is {self.dp_size}, expected {sizes}: the {self.world_size} ranks of the layer bring one "
                "batch of tokens together, one for each expert-parallel rank, or one each"
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
        """The config of a rank of the layer by its number.  Raises ConfigError."""
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
    """One MoE layer.

    - ``num_experts`` E over all ranks, ``num_local_experts`` on this one (default: E / ep_size)
    - ``top_k`` experts per token
    - ``hidden_size`` K and ``intermediate_size`` N per expert, on this rank
    - ``dtype`` of hidden states and output
    - ``activation_params``: alpha, beta and clamp limit; default: those of the activation
    - ``routing``: how logits become weights; needed where the layer or a monolithic kernel routes
    - ``has_bias``: w13 and w2 carry biases ``[E, 2N]`` and ``[E, K]``
    - ``apply_router_weight_on_input``: weight x instead of the expert's output (top_k must be 1)
    - ``activation_format`` that prepare hands to the experts; ``max_num_tokens`` per rank bounds it when batched
    - ``is_lora_enabled``, ``batch_invariant``: only backends that claim so are taken
    - ``max_loras`` adapters of rank ``max_lora_rank`` at most are there at the same time, with ``is_lora_enabled``
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

    if TYPE_CHECKING:  # the fields, some of which may be given by name

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
        """Experts whose weights this rank holds."""
        return self.num_local_experts if self.num_local_experts is not None else self.num_experts

    @property
    def is_gated(self) -> bool:
        return self.activation.is_gated

    @property
    def params(self) -> ActivationParams:
        """Parameters of the activation: those given, its defaults for the others."""
        return self.activation.resolve_params(self.activation_params)

    @property
    def w13_rows(self) -> int:
        """Rows of w13: 2N with a gate, else N."""
        return self.intermediate_size * (2 if self.is_gated else 1)
