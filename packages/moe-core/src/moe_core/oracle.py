"""The oracle: an ordered table of backends, one selection loop for all schemes.

A scheme's oracle is a subclass that names its backends and orders them for a
request.  Selection is pure: (device, config, keys, what is installed) -> decision.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from moe_core._autocast import without_autocast
from moe_core.config import FusedMoEActivationFormat, FusedMoEConfig
from moe_core.device import DeviceInfo
from moe_core.environment import Environment
from moe_core.errors import ConfigError, TensorError, did_you_mean
from moe_core.experts import FusedMoEExperts, FusedMoEExpertsModular
from moe_core.kernel import FusedMoEKernel
from moe_core.prepare_finalize import BatchedPrepareAndFinalize, PrepareAndFinalizeNoParallel
from moe_core.prepare_finalize.base import FusedMoEPrepareAndFinalizeModular
from moe_core.quant_key import QuantKey, as_quant_key
from moe_core.selection import Candidate, Selection, SelectionError, SelectionReport
from moe_core.weights import KernelWeights, MoEWeights
from moe_core.workspace import Workspace


@dataclass(frozen=True)
class Backend:
    """A row of the table: the backend's name and its experts classes.

    Several classes serve one backend where e.g. the batched format has a class of its own.
    ``classes`` are classes, or "module:Class" that is imported when the table is first read; an
    experts module must import without Triton or a kernel library.
    """

    name: str
    classes: tuple[type[FusedMoEExperts] | str, ...]
    origin: str = ""
    _loaded: list[type[FusedMoEExperts]] = field(default_factory=list, compare=False, repr=False)

    def load(self) -> tuple[type[FusedMoEExperts], ...]:
        if not self._loaded:
            self._loaded.extend(_import(c) if isinstance(c, str) else c for c in self.classes)
        return tuple(self._loaded)


def _import(path: str) -> type[FusedMoEExperts]:
    module, _, name = path.partition(":")
    found: type[FusedMoEExperts] = getattr(importlib.import_module(module), name)
    return found


class Oracle:
    """Selection, conversion and construction for one scheme.

    Subclasses set ``scheme`` and ``backends`` (in default order) and may override
    :meth:`order`.  Backends of other packages are appended through :meth:`add_backend`.
    ``weight_only``: where nobody says what activations are quantised as, they are in 16 bits.
    """

    scheme: ClassVar[str]
    backends: ClassVar[tuple[Backend, ...]]
    weight_only: ClassVar[bool] = False

    def __init__(self) -> None:
        self._added: list[Backend] = []

    def add_backend(self, backend: Backend) -> None:
        """Take a further backend into the table (the registry does this for entry points)."""
        for known in self.table():
            if known.name == backend.name:
                raise ConfigError(
                    f"{self.scheme} already has a backend {backend.name!r}"
                    f" (from {known.origin or 'its own package'}); {backend.origin or 'the new one'} needs another name"
                )
        self._added.append(backend)

    def table(self) -> tuple[Backend, ...]:
        """Every backend in default order."""
        return (*self.backends, *self._added)

    def order(
        self,
        table: tuple[Backend, ...],
        device: DeviceInfo,
        config: FusedMoEConfig,
        weight_key: QuantKey | None,
        activation_key: QuantKey | None,
    ) -> tuple[Backend, ...]:
        """The table in order of preference for this request."""
        return table

    def check_request(
        self, config: FusedMoEConfig, weight_key: QuantKey | None, activation_key: QuantKey | None
    ) -> None:
        """Raise ConfigError for a request that this scheme cannot mean at all."""

    def select(
        self,
        config: FusedMoEConfig,
        *,
        weight_key: QuantKey | str | None,
        activation_key: QuantKey | str | None,
        moe_backend: str = "auto",
        device: DeviceInfo | str | torch.device | None = None,
        environment: Environment | None = None,
    ) -> Selection:
        """The first backend in order that fits; or the named one, or an error with every reason.

        Keys are given as such or by name, None for 16 bits; ``device``: see :func:`as_device_info`.
        Raises SelectionError (with the full report) when nothing fits, ConfigError for an unknown name.
        """
        if not isinstance(config, FusedMoEConfig):
            raise ConfigError(f"config is {type(config).__name__}, expected a FusedMoEConfig")
        weight_key = as_quant_key(weight_key, "weight_key")
        activation_key = as_quant_key(activation_key, "activation_key")
        device = as_device_info(device)
        environment = environment or Environment.current()
        self.check_request(config, weight_key, activation_key)
        name = getattr(moe_backend, "value", moe_backend)
        ordered = self.order(self.table(), device, config, weight_key, activation_key)
        if name != "auto" and name not in [b.name for b in ordered]:
            known = ["auto", *(b.name for b in ordered)]
            raise ConfigError(
                f"{self.scheme} has no backend {name!r}{did_you_mean(name, known)}; installed: {', '.join(known)}"
            )
        candidates = tuple(
            Candidate(
                backend.name,
                experts,
                tuple(experts.unsupported_reasons(config, weight_key, activation_key, device, environment)),
                experts.claims.verified_for(weight_key, activation_key),
                experts.claims.takes_keys(weight_key, activation_key),
            )
            for backend in ordered
            for experts in backend.load()
        )
        chosen = next((c for c in candidates if c.fits and name in ("auto", c.backend)), None)
        report = SelectionReport(self.scheme, device, config, weight_key, activation_key, name, candidates, chosen)
        if chosen is None:
            what = "no backend fits" if name == "auto" else f"backend {name!r} does not fit, and is never replaced"
            raise SelectionError(f"{self.scheme}: {what}\n{report}", report)
        return Selection(chosen.backend, chosen.experts, report)

    @without_autocast
    @torch.no_grad()
    def convert(
        self, selection: Selection, weights: MoEWeights | None = None, **tensors: torch.Tensor | None
    ) -> KernelWeights:
        """Canonical weights, or their tensors by name (``w13=…, w2=…, w13_scale=…``), in the backend's layout.

        Raises TensorError for tensors that don't fit the selection's config and keys.
        """
        if (weights is None) == (not tensors):
            raise TensorError("give either canonical weights or their tensors by name")
        if weights is not None and not isinstance(weights, MoEWeights):
            raise TensorError(f"weights is {type(weights).__name__}, expected canonical weights: MoEWeights(w13=…)")
        if weights is None:
            missing = [name for name in ("w13", "w2") if tensors.get(name) is None]
            if missing:
                raise TensorError(f"{', '.join(missing)} is missing")
            unknown = tensors.keys() - MoEWeights.__dataclass_fields__.keys()
            if unknown:
                raise TensorError(
                    f"unknown weight tensors {sorted(unknown)}; known: {sorted(MoEWeights.__dataclass_fields__)}"
                )
            weights = MoEWeights(
                weight_key=selection.weight_key,
                activation_key=selection.activation_key,
                **tensors,  # type: ignore[arg-type]
            )
        elif (weights.weight_key, weights.activation_key) != (selection.weight_key, selection.activation_key):
            raise TensorError(
                f"the weights are {weights.weight_key} with activations {weights.activation_key}, "
                f"the selection was made for {selection.weight_key} with {selection.activation_key}"
            )
        weights.validate(selection.config)
        return self.make_experts(selection).convert(weights.detached().row_major())

    @staticmethod
    def make_experts(selection: Selection) -> FusedMoEExperts:
        """The selected class for the selection's layer and device."""
        return selection.experts(
            selection.config,
            weight_key=selection.weight_key,
            activation_key=selection.activation_key,
            device=selection.device,
        )

    def make_kernel(
        self,
        selection: Selection,
        weights: KernelWeights,
        *,
        prepare_finalize: FusedMoEPrepareAndFinalizeModular | None = None,
        workspace: Workspace | None = None,
    ) -> FusedMoEKernel:
        """prepare + experts + finalize around ``weights``; ``workspace``: may be shared with layers that run before."""
        config = selection.config
        experts = self.make_experts(selection)
        if isinstance(experts, FusedMoEExpertsModular) and prepare_finalize is None:
            prepare_finalize = default_prepare_finalize(config)
        return FusedMoEKernel(experts, weights, prepare_finalize, workspace=workspace)


def default_prepare_finalize(config: FusedMoEConfig) -> FusedMoEPrepareAndFinalizeModular:
    """What moves tokens where none was given: nothing, or a local scatter for batched experts.

    Raises ConfigError where tokens must cross ranks: an engine passes its own then.
    """
    if config.parallel.use_all2all_kernels:
        raise ConfigError(
            f"tokens cross ranks (dp {config.parallel.dp_size}, ep {config.parallel.ep_size}): pass prepare_finalize="
        )
    if config.activation_format is FusedMoEActivationFormat.BATCHED:
        return BatchedPrepareAndFinalize(config)
    return PrepareAndFinalizeNoParallel(config)


def as_device_info(device: DeviceInfo | str | torch.device | None) -> DeviceInfo:
    """A DeviceInfo from what users pass: see :meth:`DeviceInfo.parse`; "cuda", a torch device, or None for this one's.

    Raises ConfigError for a name that is not known, and for a GPU that is not here.
    """
    if isinstance(device, DeviceInfo):
        return device
    if isinstance(device, torch.device):
        return DeviceInfo.current(device)
    if device is None:
        return DeviceInfo.current()
    known = DeviceInfo.current if str(device).partition(":")[0] in ("cuda", "xpu") else DeviceInfo.parse
    return known(device)
