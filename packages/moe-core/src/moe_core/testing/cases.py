"""Cases of the conformance kit, generated from the claims of an experts class.

A case is data: the check, the layer, the keys, the number of tokens and a seed. Its id states all of them. The budgets
cover the claims in as few cases as a greedy search finds:

- "small": every claimed value of every factor. Some factors, and the values of a key pattern, are covered in pairs.
- "full": every key, and every pair of values of any two factors.

Both add layers that are large in one dimension (:data:`_LARGE`), for mistakes that small sizes hide.

Layers that the claims allow but :meth:`~moe_core.interface.experts.FusedMoEExperts.extra_reasons` refuses are skipped.
If that leaves no layer for a claimed value, a case of the check "claims" reports it as a failure.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from moe_core.errors import ConfigError
from moe_core.interface.claims import Claims, KeyClaim, expand_key
from moe_core.interface.experts import FusedMoEExperts
from moe_core.spec.activation import ActivationParams, MoEActivation
from moe_core.spec.config import FusedMoEActivationFormat, FusedMoEConfig
from moe_core.spec.device import DeviceInfo
from moe_core.spec.environment import TRITON, Environment
from moe_core.spec.numerics import NumberKind
from moe_core.spec.quant_key import NAMES, KeyPattern, QuantKey
from moe_core.spec.routing import RoutingConfig, RoutingMethodType
from moe_core.testing.covering import Row, covering_rows
from moe_core.testing.data import ROUTINGS

BUDGETS = ("small", "full")
#: factors with few values that mistakes often combine
PAIRED_IN_SMALL = ("routing", "format", "map", "bias", "ids", "strided", "on_input", "lora")
#: parameter combinations that one case must contain if the experts read ids and router weights, so that a bug there
#: changes a result
TOGETHER: tuple[dict[str, Any], ...] = (
    {"format": FusedMoEActivationFormat.STANDARD, "routing": "invalid", "ids": torch.int64},
    {"format": FusedMoEActivationFormat.STANDARD, "routing": "invalid", "map": True},
    {"format": FusedMoEActivationFormat.STANDARD, "routing": "nothing", "map": True},
    {"format": FusedMoEActivationFormat.STANDARD, "routing": "uniform", "on_input": True, "tokens": 17},
)
#: several adapters, with a rank that is not a power of two
_LORA: dict[str, Any] = {"is_lora_enabled": True, "max_loras": 3, "max_lora_rank": 12}
KeyPair = tuple[QuantKey | None, QuantKey | None]

#: minimum tokens, hidden and intermediate size of a layer of two experts: full many-row tiles and long loops
_MANY_ROWS = (1024, 2048, 1024)
#: the same for gemm1 tiles that may end before the last 128 columns of an intermediate row
_MANY_NARROW_ROWS = (264, 64, 40)
#: experts, top-k, minimum hidden and intermediate size, and tokens of layers that are large in one dimension: more
#: experts and a larger top-k than other cases, or rows of many tiles with a partial last tile
_LARGE = ((64, 8, 64, 40, 9), (2, 1, 1100, 40, 3))
#: hidden size, intermediate size and tokens of the batch-invariance layers
_LONG_ROWS = (1024, 768, 300)
_LONG_ROWS_IN_SMALL = (1024, 128, 33)
#: experts, top-k, minimum hidden and intermediate size, and tokens of layers whose tokens differ in magnitude
_MAGNITUDES = (2, 1, 64, 40, 17)
#: a limit that many values reach
_LIMIT = ActivationParams(limit=0.75)
#: checks that need a GPU
GPU_CHECKS = ("graph", "sync", "memory")


@dataclass(frozen=True)
class Case:
    """One conformance case; ``repr`` evaluates back.

    Attributes:
        check: Name of a function in :mod:`moe_core.testing.checks`.
        config: The layer.
        weight_key: Weight format; None for 16-bit weights.
        activation_key: Activation format; None for 16-bit activations.
        tokens: Number of tokens.
        routing: One of :data:`moe_core.testing.data.ROUTINGS`.
        ids_dtype: Dtype of the expert ids.
        strided: Whether the arguments have padded rows.
        reason: Why a claimed value has no supported configuration (check "claims").
    """

    check: str
    config: FusedMoEConfig
    weight_key: QuantKey | None
    activation_key: QuantKey | None
    tokens: int = 17
    routing: str = "uniform"
    ids_dtype: torch.dtype = torch.int32
    strided: bool = False
    reason: str = ""

    @property
    def id(self) -> str:
        """Readable name, unique among the cases of one class."""
        config = self.config
        parts = [self.check, _key(self.weight_key), _key(self.activation_key), _activation(config)]
        parts += [str(config.dtype).removeprefix("torch."), f"E{config.num_experts}k{config.top_k}"]
        parts += [f"K{config.hidden_size}N{config.intermediate_size}", f"M{self.tokens}", self.routing]
        flags = {
            "bias": config.has_bias,
            f"local{config.local_experts}": config.local_experts < config.num_experts,
            "on_input": config.apply_router_weight_on_input,
            "batched": config.activation_format is FusedMoEActivationFormat.BATCHED,
            "int64": self.ids_dtype is torch.int64,
            "strided": self.strided,
            "lora": config.is_lora_enabled,
        }
        parts += [name for name, on in flags.items() if on]
        if config.routing is not None:
            parts.append(config.routing.method.name)
        return "-".join(parts)

    @property
    def seed(self) -> int:
        """Seed derived from the id, so that equal cases hold equal tensors."""
        return zlib.crc32(self.id.encode())


def _key(key: QuantKey | None) -> str:
    if key is None:
        return "16bit"
    if key in NAMES:
        return NAMES[key]
    parts = [key.dtype.name, str(key.group_shape).replace(" ", "_"), str(key.scale).split()[1]]
    parts += ["asym"] * (not key.symmetric) + ["permuted"] * key.permuted + ["pre_scaled"] * key.pre_scaled
    parts += ["dynamic"] * (not key.is_static)
    return "_".join(parts)


def _activation(config: FusedMoEConfig) -> str:
    params = config.activation_params
    named = ("alpha", "beta", "limit")
    given = [] if params is None else [f"{n}{v:g}" for n in named if (v := getattr(params, n)) is not None]
    return "_".join([config.activation.value, *given])


def expand_keys(claims: Claims) -> list[KeyPair]:
    """Return every claimed (weight key, activation key) pair, with patterns expanded.

    Args:
        claims: Claims of an experts class.

    Returns:
        The pairs, without duplicates.
    """
    return list(dict.fromkeys((w, a) for wc, ac in claims.keys for w in expand_key(wc) for a in expand_key(ac)))


def covered_keys(claims: Claims) -> list[KeyPair]:
    """Return enough keys of every claimed pattern pair to cover all pairs of a pattern's values.

    Args:
        claims: Claims of an experts class.

    Returns:
        (weight key, activation key) pairs, without duplicates.
    """

    def cover(claim: KeyClaim) -> list[QuantKey | None]:
        if not isinstance(claim, KeyPattern):
            return [claim]
        factors = dict(zip(("shape", "dtype", "permuted", "pre_scaled"), claim.choices, strict=True))
        return [claim.key(**row) for row in covering_rows(factors, lambda row: True, paired=factors)]

    return list(dict.fromkeys((w, a) for wc, ac in claims.keys for w in cover(wc) for a in cover(ac)))


def _groups_and_sizes(keys: Sequence[KeyPair], shapes: Sequence[tuple[int, int]]) -> list[Row]:
    """For group-quantized integers, combine every group size with every layer shape in one case."""
    alike: dict[Any, list[KeyPair]] = {}
    for weight, activation in keys:
        if weight is not None and weight.dtype.kind is NumberKind.UINT:
            alike.setdefault((weight.dtype, weight.group_shape, activation), []).append((weight, activation))
    return [
        {"keys": pairs[number % len(pairs)], "shape": shape}
        for pairs in alike.values()
        for number, shape in enumerate(shapes)
    ]


def conformance_cases(
    experts: type[FusedMoEExperts], *, target: DeviceInfo, budget: str = "small", on_gpu: bool = False
) -> list[Case]:
    """Return the cases of ``experts`` on the device ``target``.

    Args:
        experts: Experts class.
        target: Device that the experts are created for. It may differ from the device of the tensors, for example for a
            GPU kernel in the Triton interpreter.
        budget: "small" or "full".
        on_gpu: Whether the tensors are on a GPU, so that graphs, synchronization and memory can be checked.

    Returns:
        The cases; empty if the claims exclude ``target``.

    Raises:
        ConfigError: The budget is unknown.
    """
    if budget not in BUDGETS:
        raise ConfigError(f"the budget is {' or '.join(BUDGETS)}, got {budget!r}")
    claims = experts.claims
    if all(r.reason_against(target) is not None for r in claims.devices):
        return []
    environment = Environment.current()
    factors = _factors(claims, budget)
    smallest = min(factors["shape"], key=lambda shape: shape[0] * shape[1])
    refusals: dict[tuple[str, Any], str] = {}

    def supported(case: Case) -> tuple[bool, str | None]:
        return experts.is_supported_config(
            case.config, case.weight_key, case.activation_key, device=target, environment=environment
        )

    def allowed(row: Row) -> bool:
        case = case_of(row)
        if case is None:
            return False
        fits, reason = supported(case)
        if not fits:
            for item in row.items():
                refusals.setdefault(item, reason or "no reason given")
        # In the small budget, a large batch requires the smallest layer and top-k 1 to save time.
        light = row["shape"] == smallest and case.config.top_k == 1
        return fits and (budget == "full" or case.tokens < 64 or light)

    fillers = {"tokens": (1, 3, 17), "routing": ROUTINGS[:4]} if budget == "small" else {}
    paired = list(factors) if budget == "full" else [name for name in PAIRED_IN_SMALL if name in factors]
    together = [*TOGETHER, *_groups_and_sizes(factors["keys"], factors["shape"])]
    # Without a required library every layer is refused, each after a long search.
    lacking = next(filter(None, map(environment.reason_against, claims.requires)), None)
    rows = [] if lacking else covering_rows(factors, allowed, paired=paired, together=together, fillers=fillers)
    cases = [case for row in rows if (case := case_of(row)) is not None]
    cases += _Layers(experts, cases, supported, full=budget == "full", on_gpu=on_gpu).cases()
    template = cases[0] if cases else None
    for name in ("keys", "activation", "dtype", "format", "method"):
        for value in factors[name]:
            if not any(row[name] == value for row in rows):
                reason = lacking or refusals.get((name, value), "no shape fits the claims")
                cases.append(_missing(template, name, value, reason))
    return list(dict.fromkeys(cases))


def _factors(claims: Claims, budget: str) -> dict[str, list[Any]]:
    """Return the values of each factor."""
    full = budget == "full"
    maps = [False, True] if claims.expert_map else [False]
    weighted = [False, True] if claims.apply_router_weight_on_input else [False]
    methods: list[RoutingMethodType | None] = [None]
    if claims.routing_methods is not None:
        methods = [*sorted(claims.routing_methods)]
    return {
        "keys": expand_keys(claims) if full else covered_keys(claims),
        "activation": activations_of(claims),
        "tokens": [1, 3, 17, 64, 257, 0],
        "routing": list(ROUTINGS) if claims.routing_methods is None else ["uniform"],
        "shape": _shapes(claims, full),
        "experts": _expert_counts(claims, full),
        "dtype": sorted(claims.dtypes, key=str),
        "bias": [False, True] if claims.bias else [False],
        "map": maps,
        "ids": [torch.int32, torch.int64],
        "strided": [False, True],
        "on_input": weighted,
        "format": sorted(claims.formats, key=lambda f: f.value, reverse=True),
        "method": methods,
        **({"lora": [False, True]} if claims.lora else {}),
    }


def _expert_counts(claims: Claims, full: bool) -> list[tuple[int, int]]:
    """Return (experts, top-k) pairs: small ones, and the maximum that the claims state."""
    found = [(8, 2), (4, 1), (3, 3), (5, 4)] + [(64, 6)] * full
    if claims.max_experts:
        found = [pair for pair in found if pair[0] <= claims.max_experts]
        found.append((claims.max_experts, 1))
    if claims.max_top_k:
        found = [pair for pair in found if pair[1] <= claims.max_top_k]
        if not claims.max_experts or claims.max_top_k <= claims.max_experts:
            found.append((max(8, claims.max_top_k), claims.max_top_k))
    return list(dict.fromkeys(found))


def activations_of(claims: Claims) -> list[tuple[MoEActivation, ActivationParams | None]]:
    """Return every claimed activation with each of its parameter sets.

    Args:
        claims: Claims of an experts class.

    Returns:
        (activation, parameters): with the defaults (None), with other parameters, and with another limit if limits are
        claimed.
    """
    found: list[tuple[MoEActivation, ActivationParams | None]] = []
    for activation in sorted(claims.activations, key=lambda a: a.value):
        found.append((activation, None))
        own = activation.parameters - {"limit"}
        if own:
            found.append((activation, ActivationParams(**{name: {"alpha": 1.25, "beta": 0.5}[name] for name in own})))
        if claims.limits(activation):
            found.append((activation, _LIMIT))
            if activation.default_params().limit is not None:
                found.append((activation, ActivationParams(limit=float("inf"))))
    return found


def _shapes(claims: Claims, full: bool) -> list[tuple[int, int]]:
    """Return (hidden, intermediate) sizes: even and odd multiples of the claimed multiple.

    They are below and above common block sizes.
    """

    def even(size: int, multiple: int) -> int:
        return 2 * multiple * max(1, -(-size // (2 * multiple)))

    def odd(size: int, multiple: int) -> int:
        count = max(1, size // multiple)
        return multiple * (count if count % 2 else count + 1)

    h, n = claims.hidden_multiple, claims.intermediate_multiple
    shapes = [(even(256, h), even(128, n)), (odd(200, h), odd(136, n)), (odd(96, h), odd(264, n))]
    if full:
        shapes += [(even(512, h), even(384, n)), (odd(330, h), odd(72, n)), (odd(40, h), odd(24, n))]
    return list(dict.fromkeys(shapes))


def case_of(row: Row) -> Case | None:
    """Return the case that a row describes, or None if its values contradict each other.

    Args:
        row: One value per factor.

    Returns:
        A case of the check "values", or None.
    """
    (weight_key, activation_key), (activation, params) = row["keys"], row["activation"]
    experts, top_k = row["experts"]
    batched = row["format"] is FusedMoEActivationFormat.BATCHED
    if row["on_input"] and top_k != 1:
        return None
    if row["routing"] == "idle" and top_k == experts:
        return None
    if row["routing"] in ("invalid", "nothing") and not 3 <= row["tokens"] <= (
        64 if row["routing"] == "invalid" else 17
    ):
        return None  # Fewer tokens do not show every kind; more tokens add no information.
    try:
        config = FusedMoEConfig(
            num_experts=experts,
            top_k=top_k,
            hidden_size=row["shape"][0],
            intermediate_size=row["shape"][1],
            activation=activation,
            dtype=row["dtype"],
            num_local_experts=-(-experts // 2) if row["map"] else experts,
            activation_params=params,
            routing=None if row["method"] is None else routing_of(row["method"]),
            has_bias=row["bias"],
            apply_router_weight_on_input=row["on_input"],
            activation_format=row["format"],
            max_num_tokens=max(row["tokens"], 1) if batched else None,
            **(_LORA if row.get("lora") else {}),
        )
        if config.routing is not None:
            config.routing.check(num_experts=experts, top_k=top_k)
    except ConfigError:
        return None
    return Case("values", config, weight_key, activation_key, row["tokens"], row["routing"], row["ids"], row["strided"])


def routing_of(method: RoutingMethodType) -> RoutingConfig:
    """Return a routing configuration with two groups, one used, and a non-unit scaling factor.

    Args:
        method: Routing method. Only DeepSeekV3 uses the groups; Custom routes by the largest absolute logits.

    Returns:
        The routing configuration.
    """
    if method is RoutingMethodType.DeepSeekV3:
        return RoutingConfig.from_method(method, num_expert_group=2, topk_group=1, routed_scaling_factor=2.5)
    if method is RoutingMethodType.Custom:
        return RoutingConfig.from_method(method, custom=_first_experts)
    return RoutingConfig.from_method(method, routed_scaling_factor=2.5)


def _first_experts(router_logits: torch.Tensor, *, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Custom routing: select the logits of largest magnitude and weight them by it."""
    found = router_logits.float().abs().topk(top_k, dim=1)
    return found.values, found.indices.int()


def _resized(case: Case, check: str, tokens: int, *, routing: str = "uniform", **changes: Any) -> Case:
    """Return a case of another check, with other fields of the layer."""
    layout = changes.get("activation_format", case.config.activation_format)
    room = tokens if layout is FusedMoEActivationFormat.BATCHED else None
    config = replace(case.config, max_num_tokens=room, **changes)
    return replace(case, check=check, config=config, tokens=tokens, routing=routing, strided=False)


def _multiple(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _calls_a_library(experts: type[FusedMoEExperts]) -> bool:
    """Whether a kernel library, or a test double of one, quantizes.

    The library then chooses the smallest scale itself.
    """
    declared = (vars(base).get("claims") for base in experts.__mro__)
    return any(requirement != TRITON for claims in declared if claims is not None for requirement in claims.requires)


@dataclass(frozen=True)
class _Layers:
    """Cases of whole layers and of large ones, derived from layers that also have a "values" case.

    Attributes:
        experts: Experts class.
        layers: Cases of the check "values".
        supported: Answers (whether the class runs a case, reason against it).
        full: Whether the budget is "full".
        on_gpu: Whether the tensors are on a GPU.
    """

    experts: type[FusedMoEExperts]
    layers: list[Case]
    supported: Callable[[Case], tuple[bool, str | None]]
    full: bool
    on_gpu: bool

    @property
    def everywhere(self) -> bool:
        """Whether time suffices for every pair of keys."""
        return self.on_gpu or self.full

    def cases(self) -> list[Case]:
        """Return the cases."""
        claims = self.experts.claims
        converted, found = self.whole(), self.fitting(self.many_rows(*_MANY_ROWS)) if self.on_gpu else []
        found = converted + found
        if claims.keeps_nan:
            found += self.nan(found)
        found += self.large()
        if not _calls_a_library(self.experts):
            found += self.range()
        narrow = self.fitting(self.many_rows(*_MANY_NARROW_ROWS))
        found += narrow if self.everywhere else narrow[:1]
        if claims.batch_invariant:
            found += self.invariance([case for case in converted if case.check == "convert"])
        return found

    def fitting(self, cases: Iterable[Case]) -> list[Case]:
        """Return the supported ones of some cases."""
        return [case for case in cases if self.supported(case)[0]]

    def by_keys(self, preference: Callable[[Case], Any], condition: Callable[[Case], bool]) -> list[Case]:
        """Return the preferred layer of every pair of keys that meets a condition."""
        found: dict[KeyPair, Case] = {}
        for case in sorted(filter(condition, self.layers), key=preference):
            found.setdefault((case.weight_key, case.activation_key), case)
        return list(found.values())

    def whole(self) -> list[Case]:
        """Return conversion for every pair of keys and reloading for every weight key.

        On a GPU, everything that captured graphs rely on is checked for every pair of keys and activation format.
        """
        weights: dict[QuantKey | None, Case] = {}
        layouts: dict[FusedMoEActivationFormat, Case] = {}

        def preference(case: Case) -> tuple[bool, bool, int]:
            config = case.config
            cost = 0 if self.on_gpu else config.hidden_size * config.intermediate_size * config.top_k
            # Few tokens may select no local expert: if there are many experts, or top-k is 1 on a shard of them.
            missed = config.num_experts > 64 or (config.local_experts < config.num_experts and config.top_k == 1)
            return (case.routing != "uniform" or not case.tokens or case.strided, missed, cost)

        def layer(case: Case) -> Case:
            # The interpreter takes seconds for what a GPU does instantly.
            return _resized(case, "values", min(max(case.tokens, 3), 17 if self.on_gpu else 9))

        for case in sorted(self.layers, key=preference):
            weights.setdefault(case.weight_key, layer(case))
            layouts.setdefault(case.config.activation_format, layer(case))
        pairs = [layer(case) for case in self.by_keys(preference, lambda case: True)]
        one, some = pairs[:1], pairs if self.full else pairs[:1]
        reloaded = pairs if self.full else list(weights.values())
        checks = {"convert": pairs, "reload": reloaded, "compile": some, "opcheck": some, "refusals": one}
        if self.on_gpu and self.experts.claims.cuda_graph:
            checks |= {check: [*pairs, *layouts.values()] for check in GPU_CHECKS}
        return [replace(layer, check=check) for check, chosen in checks.items() for layer in chosen]

    def many_rows(self, tokens: int, hidden: int, size: int) -> Iterator[Case]:
        """Yield a case with hundreds of rows per expert for every pair of keys.

        Such layers use other tiles and keep more work in flight. The arguments are minimum sizes. Activations are gated
        if any case of the keys is gated. For the first pair and every second one after it, most ids select no expert
        and the number of tokens is doubled.
        """
        claims = self.experts.claims
        sizes: dict[str, Any] = {
            "hidden_size": _multiple(hidden, claims.hidden_multiple),
            "intermediate_size": _multiple(size, claims.intermediate_multiple),
        }
        plain = self.by_keys(
            lambda case: not case.config.is_gated,
            lambda case: case.config.routing is None and not case.config.is_lora_enabled,
        )
        for case, routing in zip(plain, itertools.cycle(("invalid", "uniform")), strict=False):
            count = tokens if routing == "uniform" else 2 * tokens
            yield _resized(
                case, "many_rows", count, routing=routing, num_experts=2, num_local_experts=2, top_k=1, **sizes
            )

    def large(self) -> list[Case]:
        """Return a layer of each kind in :data:`_LARGE` for one pair of keys, or for all."""
        # In the standard format, the experts sort the pairs themselves.
        plain = self.by_keys(_is_batched, lambda case: not case.config.apply_router_weight_on_input)
        found: list[Case] = []
        for number, sizes in enumerate(_LARGE):
            possible = [self.fitting(self.enlarged(case, "large", *sizes))[:1] for case in plain]
            smallest = [layer for layers in possible for layer in layers]
            # Each kind uses other keys, if there are several.
            found += smallest if self.everywhere else smallest[number % max(1, len(smallest)) :][:1]
        return found

    def range(self) -> list[Case]:
        """Return cases with tokens of all magnitudes for every activation, rotating keys and dtypes.

        Only token-wise activation keys without static scales are used. float16 is excluded because it holds too few
        magnitudes. Unless :attr:`everywhere`, parameters are the defaults, plus SITU's limit, which is a different
        function.
        """
        claims = self.experts.claims
        plain = self.by_keys(
            _is_batched,
            lambda case: (
                case.config.routing is None and (case.activation_key is None or case.activation_key.is_token_wise)
            ),
        )
        dtypes = [dtype for dtype in (torch.float32, torch.bfloat16) if dtype in claims.dtypes]
        turns = list(itertools.product(plain, dtypes))
        found: list[Case] = []
        for activation, params in activations_of(claims):
            if not self.everywhere and params not in (None, _LIMIT if activation is MoEActivation.SITU else None):
                continue
            changed: dict[str, Any] = {"activation": activation, "activation_params": params}
            changed |= {"has_bias": False, "apply_router_weight_on_input": False}
            # Take the next combination that fits: not every key supports every dtype.
            for case, dtype in turns[len(found) % len(turns) :] + turns if turns else []:
                fits = self.fitting(self.enlarged(case, "range", *_MAGNITUDES, dtype=dtype, **changed))
                if fits:
                    found.append(fits[0])
                    break
        return found

    def enlarged(
        self, case: Case, check: str, experts: int, top_k: int, hidden: int, size: int, tokens: int, **changes: Any
    ) -> Iterator[Case]:
        """Yield layers of at least these sizes, smallest first.

        The second one rounds the size multiples up to 128, since quantization groups may have to be complete.
        """
        claims = self.experts.claims
        experts = min(experts, claims.max_experts or experts)
        top_k = min(top_k, claims.max_top_k or top_k, experts)
        for least in (1, 128):
            h, n = (_multiple(unit, least) for unit in (claims.hidden_multiple, claims.intermediate_multiple))
            # An odd number of claimed multiples makes the last tile a partial one.
            changes |= {"num_experts": experts, "num_local_experts": experts, "top_k": top_k, "is_lora_enabled": False}
            changes |= {"hidden_size": h * (-(-hidden // h) | 1), "intermediate_size": _multiple(size, n)}
            try:
                larger = _resized(case, check, tokens, **changes)
                if larger.config.routing is not None:
                    larger.config.routing.check(num_experts=experts, top_k=top_k)
            except ConfigError:
                continue
            yield larger

    def nan(self, cases: list[Case]) -> list[Case]:
        """Return cases with NaN among few rows (on a GPU also many), for every activation key.

        Integers with static scales cannot represent NaN and are tested in every activation format. The other keys
        rotate through the formats, unless :attr:`everywhere`.
        """
        found: dict[tuple[Any, ...], Case] = {}
        layouts = sorted(self.experts.claims.formats, key=lambda layout: layout.value)
        keys = list(dict.fromkeys(case.activation_key for case in [*self.layers, *cases]))
        for case in cases:
            if case.check not in ("convert", "many_rows"):
                continue
            key = case.activation_key
            silent = key is not None and key.dtype.kind is NumberKind.INT and key.is_static
            turn = layouts if self.everywhere or silent else [layouts[keys.index(key) % len(layouts)]]
            for layout in turn:
                tokens = case.tokens if self.everywhere else min(case.tokens, 3)
                other = _resized(case, "nan", tokens, routing=case.routing, activation_format=layout)
                if (case.check, key, layout) not in found and self.supported(other)[0]:
                    found[case.check, key, layout] = other
        return list(found.values())

    def invariance(self, given: list[Case]) -> list[Case]:
        """Return batch-invariance cases of accepted key pairs, or a failing case if there are none.

        The small budget keeps one pair. Rows are long enough that few of them may be split among programs or use
        dedicated kernels.
        """
        claims = self.experts.claims
        hidden, size, tokens = _LONG_ROWS if self.everywhere else _LONG_ROWS_IN_SMALL
        long: dict[str, Any] = {
            "hidden_size": _multiple(hidden, claims.hidden_multiple),
            "intermediate_size": _multiple(size, claims.intermediate_multiple),
        }
        if not self.full and torch.bfloat16 in claims.dtypes:
            long["dtype"] = torch.bfloat16
        kept = []
        for case in given:
            both = (_resized(case, "invariance", tokens, batch_invariant=True, **sizes) for sizes in (long, {}))
            kept += self.fitting(both)[:1]
        if given and not kept:
            one = _resized(given[0], "invariance", tokens, batch_invariant=True)
            reason = f"batch invariance is claimed, but: {self.supported(one)[1]}"
            kept = [replace(one, check="claims", reason=reason)]
        return kept if self.full else kept[:1]


def _is_batched(case: Case) -> bool:
    return case.config.activation_format is FusedMoEActivationFormat.BATCHED


_NOTHING = Case("claims", FusedMoEConfig(1, 1, 1, 1), None, None)


def _missing(template: Case | None, name: str, value: Any, reason: str) -> Case:
    """Return a failing case for a claimed value that no accepted configuration has."""
    base = template or _NOTHING
    text = f"{name} {value}" if name != "keys" else " x ".join(str(key or "16-bit") for key in value)
    base = replace(base, check="claims", reason=f"{text} is claimed, but every configuration is refused: {reason}")
    if name == "keys":
        return replace(base, weight_key=value[0], activation_key=value[1])
    return base
