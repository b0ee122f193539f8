"""One layer of a checkpoint: what it is, and its weights when they are asked for."""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from moe_core.checkpoint.experts.layer_experts import LayerExperts, find_layer
from moe_core.checkpoint.experts.quantized import QuantizedLayout
from moe_core.checkpoint.files.reading_threads import readers
from moe_core.checkpoint.model import Given, read_model
from moe_core.checkpoint.online import detect
from moe_core.checkpoint.reader import Checkpoint
from moe_core.errors import CheckpointError, CheckpointWarning, ConfigError, MoEError, RegistryError, check_instance
from moe_core.interface.checkpoint_format import CheckpointFormat, ExpertLayout
from moe_core.kernels.ops.online import OnlineQuantization
from moe_core.parallel.shard import local_expert_range
from moe_core.parallel.shard_plan import ColumnCut, column_cuts, cut_columns, plain_cut, refine
from moe_core.plugins.faults import Raised, attempt
from moe_core.selection.registry import KNOWN_SCHEMES, Registry
from moe_core.spec.config import FusedMoEConfig, FusedMoEParallelConfig, whole_number
from moe_core.spec.quant_key import QuantKey, as_quant_key
from moe_core.spec.weights import MoEWeights

T = TypeVar("T")

#: modules of this project, whose errors are their own
_OWN = ("moe_core", *(package.replace("-", "_") for package in KNOWN_SCHEMES.values()))

#: of static activations
_STATIC = ("w13_input_scale", "w2_input_scale", "w13_input_zero_point", "w2_input_zero_point")
#: instead of an activation key: what the checkpoint says
AS_STORED = "checkpoint"


@dataclass(frozen=True, eq=False)
class LayerSource:
    """What :func:`read_layer` found; no expert weights are read until :meth:`weights`.

    - ``index`` of the layer, ``prefix`` of its experts' tensors
    - ``format`` that reads it, ``layout`` that it found
    - ``config``, ``weight_key``, ``activation_key`` (as the checkpoint says, or as was asked for), ``scheme``: what
      selection needs
    - ``whole``: the config before a tensor-parallel rank's columns were cut
    - ``cut``: how tensor-parallel ranks share the columns; ``cuts``: every way, see :meth:`with_cut`
    - ``experts``: global ids of the experts to load
    - ``router_weight`` [E, K], ``router_bias`` [E] float32: None where the checkpoint has none
    - ``correction_bias`` [E] float32: where the routing has one
    - ``routing_reason``: why ``config.routing`` is None, if it is
    - ``assumed``: what is guessed of a model_type that is not known, where the caller accepts that
    """

    index: int
    prefix: str
    config: FusedMoEConfig
    weight_key: QuantKey | None
    activation_key: QuantKey | None
    scheme: str
    format: CheckpointFormat
    layout: ExpertLayout
    whole: FusedMoEConfig
    cut: ColumnCut
    cuts: tuple[ColumnCut, ...]
    experts: tuple[int, ...]
    router_weight: Tensor | None
    router_bias: Tensor | None
    correction_bias: Tensor | None
    routing_reason: str | None
    assumed: str | None

    @property
    def layer(self) -> LayerExperts:
        """The experts' tensors."""
        return self.layout.layer

    def with_cut(self, cut: ColumnCut) -> LayerSource:
        """The same layer, of whose columns the ranks have other shares; the keys are those of the cut."""
        begin, end = cut.ranges[self.config.parallel.tp_rank]
        return replace(
            self,
            cut=cut,
            config=replace(self.config, intermediate_size=end - begin),
            weight_key=cut.weight_key,
            activation_key=cut.activation_key,
        )

    def check_fits(self) -> None:
        """Raise CheckpointError where :meth:`weights` would for a tensor's name, shape or dtype; reads no weights."""
        _of_format(self.format, lambda: self.layout.check_fits(self.whole, experts=self.experts))

    def weights(self, device: torch.device | str = "cpu") -> MoEWeights:
        """Canonical weights of ``experts`` on ``device``, this rank's columns of them.

        No more columns are read than lie in one piece of the file with them (of 16-bit experts: than share scales).
        CheckpointError names a tensor that is broken.
        """
        rank, size = self.config.parallel.tp_rank, self.whole.intermediate_size
        begin, end = self.cut.ranges[rank]
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
        if self.cut.activation_key is None or not self.cut.activation_key.is_static:
            static = dict.fromkeys(_STATIC)
        here = replace(self.whole, intermediate_size=last - first)
        weights = refine(here, weights, self.cut.weight_key)
        weights = cut_columns(here, weights, begin - first, end - first, with_bias=rank == 0)
        return replace(weights, activation_key=self.activation_key, **static)

    def _read_columns(self, begin: int, end: int) -> tuple[int, int]:
        """The columns that are read for ``begin`` to ``end``."""
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
    given: Given | None = None,
    parallel: FusedMoEParallelConfig | None = None,
    plugins: Registry | None = None,
) -> LayerSource:
    """Layer ``layer`` of the model, default the first with experts: names, shapes, config, format; no weights yet.

    ``dtype`` of hidden states; ``experts``: global ids to load, default all; ``quantize``: what to make of 16-bit
    experts, by the name that an installed scheme gives it; ``activation_key``: what activations are quantised as, None
    for 16 bits, instead of what the checkpoint says; ``stack``: of a model with several stacks of layers, the first
    part of the tensors' names ("talker"); ``given``: routing and activation, which an unknown model_type needs;
    ``parallel``: of which rank the experts, unless they are named, and their columns are.
    Raises CheckpointError, SchemeNotInstalledError, ConfigError for static activations, whose scales only a checkpoint
    that has them brings; warns with CheckpointWarning of what is guessed.
    """
    if layer is not None:
        layer = whole_number("layer", layer, 0)
    check_instance("checkpoint", checkpoint, Checkpoint)
    parallel = parallel or FusedMoEParallelConfig()
    with checkpoint.reading():
        tensors = find_layer(checkpoint, layer, stack)
        chosen = _chosen(experts, tensors.num_experts, parallel)
        model = read_model(tensors, dtype=dtype, num_local_experts=len(chosen), given=given)
        scheme, adapter, layout = detect(checkpoint, tensors, quantize, plugins)
    if model.assumed is not None:
        warnings.warn(model.assumed, CheckpointWarning, stacklevel=2)
    weight_key = as_quant_key(layout.weight_key, "weight_key")
    activations = _activations(activation_key, layout.activation_key)
    if isinstance(layout, QuantizedLayout):
        # other activations need no static scales
        layout = replace(layout, activation_key=activations)
    cuts = column_cuts(model.config.intermediate_size, weight_key, activations, parallel.tp_size)
    found = LayerSource(
        index=tensors.index,
        prefix=tensors.prefix,
        config=replace(model.config, parallel=parallel),
        whole=model.config,
        cut=cuts[0],
        cuts=cuts,
        weight_key=weight_key,
        activation_key=activations,
        scheme=scheme,
        format=adapter,
        layout=layout,
        experts=chosen,
        router_weight=model.router_weight,
        router_bias=model.router_bias,
        correction_bias=model.correction_bias,
        routing_reason=model.routing_reason,
        assumed=model.assumed,
    )
    return found.with_cut(plain_cut(cuts))


def _of_format(adapter: CheckpointFormat, call: Callable[[], T]) -> T:
    """What a format's layout loads; a fault in the code of another package is named as such."""
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
    """What was asked for, or what the checkpoint says."""
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
    """A plain integer; whatever counts as one (numpy's, a tensor of one) is taken, a float or a bool is not."""
    try:
        index = -1 if isinstance(expert, bool) else operator.index(expert)  # type: ignore[arg-type]
    except TypeError:
        index = -1
    if not 0 <= index < count:
        raise ConfigError(f"experts holds {expert!r}, expected ids within 0..{count - 1}")
    return index
