"""Describe one layer of a checkpoint and load its weights on request."""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from moe_core.checkpoint.experts.find_layer import find_layer
from moe_core.checkpoint.experts.layer_experts import LayerExperts
from moe_core.checkpoint.experts.quantized import QuantizedLayout
from moe_core.checkpoint.files.reading_threads import readers
from moe_core.checkpoint.model import LayerModel, ModelSettings, read_model
from moe_core.checkpoint.online import detect
from moe_core.checkpoint.reader import Checkpoint
from moe_core.errors import CheckpointError, CheckpointWarning, ConfigError, MoEError, RegistryError, check_instance
from moe_core.interface.checkpoint_format import CheckpointFormat, ExpertLayout
from moe_core.kernels.ops.online import OnlineQuantization
from moe_core.parallel.shard import local_expert_range
from moe_core.parallel.shard_plan import ShardPlan, default_plan, refine, shard_plans, slice_columns
from moe_core.plugins.faults import Raised, attempt
from moe_core.selection.registry import KNOWN_SCHEMES, Registry
from moe_core.spec.config import FusedMoEConfig, FusedMoEParallelConfig, whole_number
from moe_core.spec.quant_key import QuantKey, as_quant_key
from moe_core.spec.roles import INPUT_FIELDS
from moe_core.spec.weights import MoEWeights

T = TypeVar("T")

#: First-party modules, whose errors are passed on unchanged.
_OWN = ("moe_core", *(package.replace("-", "_") for package in KNOWN_SCHEMES.values()))

#: Value of ``activation_key`` that selects the checkpoint's own activation quantization.
AS_STORED = "checkpoint"


@dataclass(frozen=True, eq=False)
class LayerSource(LayerModel):
    """Description of one layer of a checkpoint, from which its weights can be loaded.

    :func:`read_layer` creates it; no expert weights are read until :meth:`weights` is called. Backend selection uses
    ``config``, ``weight_key``, ``activation_key`` and ``scheme``. Its ``config`` has this rank's shard of the
    intermediate size.

    Attributes:
        index: Index of the layer.
        prefix: Prefix of its experts' tensor names.
        weight_key: Quantization of the weights; None for 16 bits.
        activation_key: Quantization of the activations, as requested or as stored; None for 16 bits.
        scheme: Name of the scheme that reads the layer.
        format: The checkpoint format that reads the layer.
        layout: The format's description of the layer's tensors.
        whole: The configuration before tensor-parallel sharding.
        plan: How the intermediate columns are split over tensor-parallel ranks.
        plans: All possible splits, see :meth:`with_plan`.
        experts: Global ids of the experts to load.
    """

    index: int
    prefix: str
    weight_key: QuantKey | None
    activation_key: QuantKey | None
    scheme: str
    format: CheckpointFormat
    layout: ExpertLayout
    whole: FusedMoEConfig
    plan: ShardPlan
    plans: tuple[ShardPlan, ...]
    experts: tuple[int, ...]

    @property
    def layer(self) -> LayerExperts:
        """The tensors of the layer's experts."""
        return self.layout.layer

    def with_plan(self, plan: ShardPlan) -> LayerSource:
        """Return the same layer with another split of its columns over tensor-parallel ranks.

        Args:
            plan: The split, one of ``plans``.

        Returns:
            The layer with the intermediate size and the quantization keys of ``plan``.
        """
        begin, end = plan.ranges[self.config.parallel.tp_rank]
        return replace(
            self,
            plan=plan,
            config=replace(self.config, intermediate_size=end - begin),
            weight_key=plan.weight_key,
            activation_key=plan.activation_key,
        )

    def check_fits(self) -> None:
        """Check names, shapes and dtypes as :meth:`weights` does, without reading weights.

        Raises:
            CheckpointError: A tensor is missing or has the wrong shape or dtype.
        """
        _of_format(self.format, lambda: self.layout.check_fits(self.whole, experts=self.experts))

    def weights(self, device: torch.device | str = "cpu") -> MoEWeights:
        """Load this rank's columns of the canonical weights of ``experts``.

        Additional columns are read only if they share stored entries with this rank's columns (or share scales, for
        16-bit experts that are quantized at load).

        Args:
            device: Where the weights are allocated.

        Returns:
            The canonical weights of this rank's shard.

        Raises:
            CheckpointError: A tensor is missing or invalid; the message names it.
            RegistryError: The format belongs to another package and raised an unexpected error.
        """
        rank, size = self.config.parallel.tp_rank, self.whole.intermediate_size
        begin, end = self.plan.ranges[rank]
        first, last = self._read_columns(begin, end)
        load = functools.partial(self.layout.load, self.whole, experts=self.experts, device=device)
        if (first, last) != (0, size):
            load = functools.partial(
                self.layout.load_columns, self.whole, first, last, experts=self.experts, device=device
            )
        try:
            with self.layer.checkpoint.reading(), readers():
                weights = _of_format(self.format, load)
        except CheckpointError as error:
            if (first, last) == (0, size):
                raise
            raise CheckpointError(
                f"{error.message} (columns {first} to {last} of the intermediate size were read)"
            ) from error
        static: dict[str, Any] = {}
        if self.plan.activation_key is None or not self.plan.activation_key.is_static:
            static = dict.fromkeys(INPUT_FIELDS)
        here = replace(self.whole, intermediate_size=last - first)
        weights = refine(here, weights, self.plan.weight_key)
        weights = slice_columns(here, weights, begin - first, end - first, with_bias=rank == 0)
        return replace(weights, activation_key=self.activation_key, **static)

    def _read_columns(self, begin: int, end: int) -> tuple[int, int]:
        """Extend the columns ``begin`` to ``end`` to whole storage units."""
        size = self.whole.intermediate_size
        unit = None if (begin, end) == (0, size) else self.layout.column_unit
        if unit is None:
            return 0, size
        return begin // unit * unit, min(-(-end // unit) * unit, size)


def read_layer(
    checkpoint: Checkpoint,
    layer: int | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    experts: Sequence[int] | None = None,
    quantize: str | OnlineQuantization | None = None,
    activation_key: QuantKey | str | None = AS_STORED,
    stack: str | None = None,
    settings: ModelSettings | None = None,
    parallel: FusedMoEParallelConfig | None = None,
    plugins: Registry | None = None,
) -> LayerSource:
    """Find the names, shapes, config and format of a layer without reading its weights.

    Warns with CheckpointWarning about settings that were guessed for an unknown model_type.

    Args:
        checkpoint: The open checkpoint.
        layer: Index of the layer; default the first one with experts.
        dtype: dtype of the hidden states.
        experts: Global ids of the experts to load; default those of the rank in ``parallel``, or all.
        quantize: Online quantization for 16-bit experts, or its name in an installed scheme.
        activation_key: Quantization of the activations, None for 16 bits; default as stored in the checkpoint.
        stack: First component of the tensor names of one stack of layers ("talker"), for models with several stacks.
        settings: Settings that override config.json; an unknown model_type needs routing and activation.
        parallel: The parallel layout and rank, which determine the columns and the default of ``experts``.
        plugins: Registry of schemes and formats; default the installed ones.

    Returns:
        The layer, from which weights can be loaded.

    Raises:
        CheckpointError: The layer is missing, invalid or not read by any installed format.
        SchemeNotInstalledError: The scheme that would read the layer is not installed.
        ConfigError: An argument is invalid, or ``activation_key`` is static and differs from the stored one: static
            scales must come from the checkpoint.
    """
    if layer is not None:
        layer = whole_number("layer", layer, 0)
    check_instance("checkpoint", checkpoint, Checkpoint)
    parallel = parallel or FusedMoEParallelConfig()
    with checkpoint.reading():
        tensors = find_layer(checkpoint, layer, stack)
        chosen = _chosen(experts, tensors.num_experts, parallel)
        model = read_model(tensors, dtype=dtype, num_local_experts=len(chosen), settings=settings)
        scheme, adapter, layout = detect(checkpoint, tensors, quantize, plugins)
    if model.assumed is not None:
        warnings.warn(model.assumed, CheckpointWarning, stacklevel=2)
    weight_key = as_quant_key(layout.weight_key, "weight_key")
    activations = _activations(activation_key, layout.activation_key)
    if isinstance(layout, QuantizedLayout):
        # The layout must know the activations in use: only static ones need stored scales.
        layout = replace(layout, activation_key=activations)
    plans = shard_plans(model.config.intermediate_size, weight_key, activations, parallel.tp_size)
    found = LayerSource(
        **vars(model) | {"config": replace(model.config, parallel=parallel)},
        index=tensors.index,
        prefix=tensors.prefix,
        whole=model.config,
        plan=plans[0],
        plans=plans,
        weight_key=weight_key,
        activation_key=activations,
        scheme=scheme,
        format=adapter,
        layout=layout,
        experts=chosen,
    )
    return found.with_plan(default_plan(plans))


def _of_format(adapter: CheckpointFormat, call: Callable[[], T]) -> T:
    """Call a format's code; report an unexpected error in a third-party format as RegistryError."""
    kind = type(adapter)
    if kind.__module__.partition(".")[0] in _OWN:
        return call()
    found = attempt(call)
    if not isinstance(found, Raised):
        return found
    if isinstance(found.error, MoEError):
        raise found.error
    where = f"{kind.__module__}:{kind.__qualname__}"
    raise RegistryError(f"the format {kind.name!r} ({where}) fails in load: {found}") from found.error


def _activations(wanted: QuantKey | str | None, stored: QuantKey | None) -> QuantKey | None:
    """Return the requested activation key, or the stored one for ``AS_STORED``."""
    key = as_quant_key(stored if wanted == AS_STORED else wanted, "activation_key")
    if key is not None and key.is_static and key != stored:
        raise ConfigError(
            f"activations of {key} have scales from a checkpoint, this one has those of "
            f"{stored or '16-bit activations, which need none'}"
        )
    return key


def _chosen(experts: Sequence[int] | None, count: int, parallel: FusedMoEParallelConfig) -> tuple[int, ...]:
    if experts is None:
        return local_expert_range(count, parallel)
    try:
        given: tuple[object, ...] = tuple(experts)
    except TypeError:
        raise ConfigError(f"experts is {experts!r}, expected ids within 0..{count - 1}") from None
    chosen = tuple(_index(expert, count) for expert in given)
    if not chosen or len(set(chosen)) != len(chosen):
        raise ConfigError(f"experts must name at least one expert, each once, got {list(chosen)[:20]}")
    return chosen


def _index(expert: object, count: int) -> int:
    """Convert an expert id (int, NumPy integer, one-element tensor); refuse floats and bools."""
    try:
        index = -1 if isinstance(expert, bool) else operator.index(expert)  # type: ignore[arg-type]
    except TypeError:
        index = -1
    if not 0 <= index < count:
        raise ConfigError(f"experts holds {expert!r}, expected ids within 0..{count - 1}")
    return index
