"""The oracle: an ordered table of backends, and one selection loop for all schemes.

A scheme's :class:`~moe_core.plugins.scheme.SchemeSpec` lists its backends and orders them for a request. Selection is a
pure function: (device, config, keys, installed packages) -> decision.
"""

from __future__ import annotations

import functools
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from moe_core._support.autocast import without_autocast
from moe_core.errors import (
    ConfigError,
    FallbackWarning,
    MoEError,
    RegistryError,
    TensorError,
    check_instance,
    did_you_mean,
)
from moe_core.interface.backend_order import arrange
from moe_core.interface.experts import FusedMoEExperts, FusedMoEExpertsModular
from moe_core.interface.prepare_finalize import FusedMoEPrepareAndFinalizeModular
from moe_core.parallel.checks import check_placed
from moe_core.parallel.prepare_finalize.by_name import ALL2ALL_BACKENDS, default_prepare_finalize, load_prepare_finalize
from moe_core.plugins.backend import Backend
from moe_core.plugins.faults import PluginFault, Raised, attempt, warn_of
from moe_core.plugins.scheme import SchemeSpec
from moe_core.runtime.kernel import FusedMoEKernel
from moe_core.selection.alternatives import Request, alternatives
from moe_core.selection.converted import check_converted, remember
from moe_core.selection.report import (
    BackendRefusedError,
    Candidate,
    NoBackendError,
    Selection,
    SelectionReport,
    UnknownBackendError,
)
from moe_core.spec.config import FusedMoEConfig
from moe_core.spec.device import DeviceInfo
from moe_core.spec.environment import Environment
from moe_core.spec.quant_key import QuantKey, as_quant_key, key_name
from moe_core.spec.weights import KernelWeights, MoEWeights
from moe_core.spec.workspace import Workspace

if TYPE_CHECKING:
    from moe_core.kernels.tuning.profile import TuningProfile
    from moe_core.parallel.distributed.groups import ParallelGroups
    from moe_core.parallel.placement.placement import ExpertPlacement

#: Held while a table is replaced, never while anything is loaded.
_CHANGING = threading.Lock()


class Oracle:
    """Selection, conversion and construction for one scheme, as declared by its ``spec``.

    Backends of other packages are added by :meth:`add_backend`, each at its
    :class:`~moe_core.interface.backend_order.Placement`.

    Args:
        spec: Spec of the scheme.
    """

    def __init__(self, spec: SchemeSpec) -> None:
        self.spec = spec
        self.scheme = spec.name
        # Copies private to this oracle: loaded classes, and failures, which name the package that provides the backend.
        self.backends = tuple(replace(row, origin=row.origin or spec.package, _loaded={}) for row in spec.backends)

    # Replaced, never mutated, so that a selection in another thread sees either the old or the new tuple.
    _added: tuple[Backend, ...] = ()
    _left_out: tuple[tuple[str, PluginFault], ...] = ()

    def add_backend(self, backend: Backend) -> None:
        """Add a backend to the table, once; the registry calls this for entry points.

        Args:
            backend: Backend to add.

        Raises:
            ConfigError: The scheme already has another backend of this name.
        """
        with _CHANGING:
            if backend in self._added:
                return
            for known in (*self.backends, *self._added):
                if known.name == backend.name:
                    raise ConfigError(
                        f"{self.scheme} already has a backend {backend.name!r} (from "
                        f"{known.origin or 'its own package'}); {backend.origin or 'the new one'} needs another name"
                    )
            self._added = (*self._added, backend)

    def leave_out(self, name: str, fault: PluginFault) -> None:
        """Record that a backend of another package does not work.

        Reports list it, and selecting it by name raises its error.

        Args:
            name: Name of the backend.
            fault: The reason.
        """
        with _CHANGING:
            if (name, fault) not in self._left_out:
                self._left_out = (*self._left_out, (name, fault))

    def table(self) -> tuple[Backend, ...]:
        """Return every backend in default order."""
        return self._placed(self.backends)[0]

    def faults(self) -> tuple[PluginFault, ...]:
        """Return the faults of everything in this scheme that is left out; loads every backend."""
        return (*(fault for _, fault in self._left_out), *(fault for b in self.table() for fault in b.faults))

    def notes(self) -> tuple[str, ...]:
        """Return which placements requested by added backends cannot be honored, in default order."""
        return self._placed(self.backends)[1]

    def priority(
        self,
        config: FusedMoEConfig,
        *,
        weight_key: QuantKey | None,
        activation_key: QuantKey | None,
        device: DeviceInfo | str | torch.device | None = None,
    ) -> tuple[Backend, ...]:
        """Return the whole table in order of preference for a request, whether backends fit or not.

        Args:
            config: Config of the layer.
            weight_key: Quantization of weights; None for 16 bits.
            activation_key: Quantization of activations; None for 16 bits.
            device: Device to order for; see :func:`as_device_info`.

        Returns:
            The backends.
        """
        weight_key = as_quant_key(weight_key, "weight_key")
        activation_key = as_quant_key(activation_key, "activation_key")
        return self._ordered(Request(config, weight_key, activation_key, as_device_info(device), Environment()))[0]

    def select(
        self,
        config: FusedMoEConfig,
        *,
        weight_key: QuantKey | str | None,
        activation_key: QuantKey | str | None,
        moe_backend: str = "auto",
        device: DeviceInfo | str | torch.device | None = None,
        environment: Environment | None = None,
        tuning: TuningProfile | str | Path | None = None,
    ) -> Selection:
        """Select the first backend that fits, or check the named one.

        Args:
            config: Config of the layer.
            weight_key: Quantization of weights: a key, its name, or None for 16 bits.
            activation_key: Quantization of activations: a key, its name, or None for 16 bits.
            moe_backend: Backend name, or "auto". A named backend is never replaced by another.
            device: Device to select for; see :func:`as_device_info`.
            environment: Installed packages. Default: those of this installation.
            tuning: Profile of measured launch configurations (:mod:`moe_core.kernels.tuning`), its path, or "none".
                Default: the path in ``MOE_TUNING``, or the user's profile for the GPU. It changes how the backend
                launches its kernels, never which one is selected.

        Returns:
            The selection, with a report on every candidate.

        Raises:
            SelectionError: No selection; the error has the full report. NoBackendError if nothing fits,
                BackendRefusedError if the named backend does not fit, UnknownBackendError if no backend has the name.
            RegistryError: The named backend is a plug-in that does not work.
            ConfigError: The scheme does not support the request, or a given tuning profile cannot be read.
        """
        if not isinstance(config, FusedMoEConfig):
            raise ConfigError(f"config is {type(config).__name__}, expected a FusedMoEConfig")
        weight_key = as_quant_key(weight_key, "weight_key")
        activation_key = as_quant_key(activation_key, "activation_key")
        request = Request(
            config, weight_key, activation_key, as_device_info(device), environment or Environment.current()
        )
        name = str(getattr(moe_backend, "value", moe_backend))
        ordered, notes = self._ordered(request)
        candidates = _examine(request, ordered)
        left_out = (
            *self._left_out,
            *((backend.name, fault) for backend in ordered for fault in backend.faults),
            *((candidate.backend, candidate.fault) for candidate in candidates if candidate.fault is not None),
        )
        chosen = next((c for c in candidates if c.fits and c.answers_to(name)), None)
        report = SelectionReport(
            self.scheme,
            request.device,
            config,
            weight_key,
            activation_key,
            name,
            candidates,
            chosen,
            left_out=tuple(fault for _, fault in left_out),
            notes=notes,
        )
        if name == "auto" and request.device.is_gpu and (chosen is None or not chosen.is_kernel):
            report = replace(report, alternatives=alternatives(request, candidates, self._candidates))
        if chosen is None:
            raise self._refusal(name, report, dict(reversed(left_out)))
        if request.device.is_gpu or tuning is not None:
            # This module does not need Triton, but imports the experts on core's kernels. A profile that was passed is
            # always read.
            from moe_core.kernels.tuning.choice import choose

            keys = weight_key, activation_key
            report = replace(report, tuning=choose(tuning, chosen.experts, config, keys, request.device))
        return Selection(self._member(chosen.backend), chosen.experts, report)

    def _refusal(self, name: str, report: SelectionReport, left_out: dict[str, PluginFault]) -> MoEError:
        """Create the error for a failed selection.

        Args:
            name: Requested backend.
            report: Report of the selection.
            left_out: First fault of each backend.
        """
        if name == "auto":
            helps = "; ".join(map(str, report.alternatives))
            why = helps or "; ".join(f"{c.backend} {', '.join(c.reasons)}" for c in report.closest[:2])
            what = f"no backend fits on {report.device}"
            if not any(candidate.takes_keys for candidate in report.candidates):
                weights, activations = key_name(report.weight_key), key_name(report.activation_key)
                what = f"no backend takes {weights} weights with {activations} activations"
            return NoBackendError(f"{self.scheme}: {what}: {why}", report)
        mine = [candidate for candidate in report.candidates if candidate.answers_to(name)]
        if name in left_out and all(candidate.fault is not None for candidate in mine):
            return left_out[name].error()
        if mine:
            fitting = next((candidate.backend for candidate in report.candidates if candidate.fits), None)
            instead = "" if fitting is None else f"; {fitting!r} fits"
            # Prefer the backend with this name to those that have it as an alias.
            closest = min(report.closest, key=lambda candidate: candidate.backend != name)
            why = "; ".join(closest.reasons)
            what = f"{self.scheme}: backend {name!r} does not fit, and is never replaced: {why}{instead}"
            return BackendRefusedError(what, report)
        known = list(dict.fromkeys(("auto", *(name for c in report.candidates for name in (c.backend, *c.aliases)))))
        return UnknownBackendError(
            f"{self.scheme} has no backend {name!r}{did_you_mean(name, known)}; installed: {', '.join(known)}", report
        )

    def _member(self, name: str) -> str:
        """The scheme's enum member for a backend, or the name if it has none."""
        members = () if self.spec.backend_enum is None else tuple(self.spec.backend_enum)
        return next((member for member in members if member.value == name), name)

    def _candidates(self, request: Request) -> tuple[Candidate, ...]:
        return _examine(request, self._ordered(request)[0])

    def _ordered(self, request: Request) -> tuple[tuple[Backend, ...], tuple[str, ...]]:
        """Order the table for ``request``; also return notes on placements.

        Raises:
            RegistryError: The functions of the scheme fail.
        """
        keys = request.weight_key, request.activation_key
        own = self.backends

        def ask() -> tuple[Backend, ...]:
            spec = self.spec
            reason: object = None if spec.reason_against is None else spec.reason_against(request.config, *keys)
            if isinstance(reason, str):
                raise ConfigError(reason)
            if reason is not None:
                raise TypeError(f"reason_against returned {reason!r}, expected a string or None")
            if spec.order is None:
                return own
            found = tuple(spec.order(own, request.device, request.config, *keys))
            strange = [row for row in found if row not in own]
            if strange or len(set(found)) < len(found):
                raise TypeError(f"order returned {found!r}, expected each of its backends once at most")
            return found

        found = attempt(ask)
        if isinstance(found, Raised):
            if isinstance(found.error, MoEError):
                raise found.error
            raise RegistryError(f"the oracle of the scheme {self.scheme!r} does not work: {found}") from found.error
        return self._placed(found)

    def _placed(self, own: tuple[Backend, ...]) -> tuple[tuple[Backend, ...], tuple[str, ...]]:
        rows, notes = arrange(
            own,
            self._added,
            name_of=lambda backend: backend.name,
            placement_of=lambda backend: backend.placement,
            last_resort=self.spec.last_resort,
        )
        origins = {backend.name: backend.origin for backend in self._added}
        return rows, tuple(f"backend {name!r} of {origins[name]}: {note}" for name, note in notes.items())

    @without_autocast
    @torch.no_grad()
    def convert(
        self, selection: Selection, weights: MoEWeights | None = None, **tensors: torch.Tensor | None
    ) -> KernelWeights:
        """Convert canonical weights to the layout of the selected backend.

        Args:
            selection: Selection of the layer.
            weights: Canonical weights.
            tensors: Their tensors by name instead (``w13=…, w2=…, w13_scale=…``).

        Returns:
            Weights in the backend's layout.

        Raises:
            TensorError: The tensors do not fit the config and keys of the selection.
        """
        check_instance("selection", selection, Selection)
        if (weights is None) == (not tensors):
            raise TensorError("pass either canonical weights or their tensors by name")
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
                f"the weights have the keys {weights.weight_key} and {weights.activation_key}, but the selection "
                f"is for {selection.weight_key} and {selection.activation_key}"
            )
        weights.validate(selection.config)
        converted = self.make_experts(selection).convert(weights.detached().row_major())
        remember(converted, selection)
        return converted

    @staticmethod
    def make_experts(selection: Selection) -> FusedMoEExperts:
        """Instantiate the selected experts class, with the launch configurations of the profile.

        Args:
            selection: Selection of the layer.

        Returns:
            Experts for the layer and device of the selection.
        """
        check_instance("selection", selection, Selection)
        made = selection.experts(
            selection.config,
            weight_key=selection.weight_key,
            activation_key=selection.activation_key,
            device=selection.device,
        )
        tuning = selection.report.tuning
        if tuning is not None and tuning.tuned is not None:
            made.tuned = tuning.tuned  # type: ignore[attr-defined]
        return made

    def make_kernel(
        self,
        selection: Selection,
        weights: KernelWeights,
        *,
        prepare_finalize: FusedMoEPrepareAndFinalizeModular | None = None,
        groups: ParallelGroups | None = None,
        placement: ExpertPlacement | None = None,
        workspace: Workspace | None = None,
        layer: str = "",
    ) -> FusedMoEKernel:
        """Build a kernel: prepare, experts and finalize around converted weights.

        With ``groups``, or a ``prepare_finalize`` that has groups, all ranks call this together and compare their
        arguments. With neither, nothing is communicated and the outputs of ranks are partial sums.

        Warns if weights on a GPU are run by a host-driven loop that was not requested (FallbackWarning), and about
        plug-ins whose claims failed (PluginWarning). Selection itself issues neither.

        Args:
            selection: Selection of the layer.
            weights: Result of :meth:`convert` for the same layer.
            prepare_finalize: Class that moves tokens between ranks, in place of ``groups`` and ``placement``.
            groups: Process groups of the layer's ranks (:class:`moe_core.parallel.distributed.ParallelGroups`). The
                config then chooses what moves tokens
                (:func:`moe_core.parallel.prepare_finalize.by_name.default_prepare_finalize`).
            placement: Placement of experts on these ranks. Default: consecutive experts.
            workspace: Workspace; may be shared with layers that run earlier.
            layer: Name of the layer, which ranks compare too.

        Returns:
            The kernel.

        Raises:
            ConfigError: Ranks passed different arguments, raised on every rank with the numbers of the ranks; or
                arguments do not fit.
            CommunicationError: A rank did not call in time.
        """
        check_instance("selection", selection, Selection)
        check_instance("layer", layer, str)
        check_instance("prepare_finalize", prepare_finalize, FusedMoEPrepareAndFinalizeModular, type(None))
        config = selection.config
        check_converted(weights, selection)
        warn_of(candidate.fault for candidate in selection.report.candidates if candidate.fault is not None)
        if selection.report.fallback is not None and weights.device.type != "cpu":
            warnings.warn(f"{self.scheme}: {selection.report.fallback}", FallbackWarning, stacklevel=2)
        experts = self.make_experts(selection)
        if prepare_finalize is not None and (groups is not None or placement is not None):
            raise ConfigError("prepare_finalize= cannot be combined with groups= or placement=, which create one")
        check_placed(groups, placement)
        if prepare_finalize is not None:
            groups, placement = prepare_finalize.groups, prepare_finalize.placement
        number = 0
        if groups is not None:
            # This must come before anything that one rank alone may reject: the others would wait for it.
            from moe_core.parallel.distributed.agreement import check_layers

            name = "" if prepare_finalize is None else prepare_finalize.name
            number = check_layers(groups.among(), experts, placement, prepare_finalize=name, layer=layer)
        if prepare_finalize is None and (groups is not None or isinstance(experts, FusedMoEExpertsModular)):
            prepare_finalize = default_prepare_finalize(
                config, groups, placement=placement, device=selection.device, experts=type(experts)
            )
        if prepare_finalize is not None:
            prepare_finalize.layer_number = number
        return FusedMoEKernel(experts, weights, prepare_finalize, workspace=workspace)


def _examine(request: Request, ordered: tuple[Backend, ...]) -> tuple[Candidate, ...]:
    """Examine every class of every backend; claims that raise become the reason against it."""
    found = []
    for backend in ordered:
        for experts in backend.load():
            candidate = attempt(functools.partial(_candidate, backend, experts, request))
            if isinstance(candidate, Raised):
                what = f"the claims of {experts.__qualname__} fail: {candidate}"
                origin = backend.origin or "an unknown distribution"
                fault = PluginFault("backend", backend.name, origin, what, candidate.error)
                candidate = Candidate(backend.name, experts, (what,), fault=fault, aliases=backend.aliases)
            found.append(candidate)
    return tuple(found)


def _candidate(backend: Backend, experts: type[FusedMoEExperts], request: Request) -> Candidate:
    keys = request.weight_key, request.activation_key
    reasons: object = experts.unsupported_reasons(request.config, *keys, request.device, request.environment)
    if not isinstance(reasons, (list, tuple)) or not all(isinstance(reason, str) for reason in reasons):
        raise TypeError(f"unsupported_reasons returned {reasons!r}, expected a list of strings")
    claims = experts.claims
    return Candidate(
        backend.name,
        experts,
        (*reasons, *_behind_prepare_finalize(experts, request)),
        claims.verified_for(*keys),
        claims.takes_keys(*keys),
        aliases=backend.aliases,
    )


def _behind_prepare_finalize(experts: type[FusedMoEExperts], request: Request) -> list[str]:
    """Reasons why the prepare/finalize of the layer's config cannot feed ``experts``.

    Empty if every rank has all tokens, or if the name belongs to an engine's own class, which the engine vouches for.
    """
    config = request.config
    name = config.parallel.all2all_backend
    if not config.parallel.use_all2all_kernels or name not in ALL2ALL_BACKENDS:
        return []
    cls = load_prepare_finalize(name)
    found = cls.unsupported_reasons(config, experts, request.device, request.environment)
    if found and cls.fallback:
        # The ranks will agree on the fallback together, and report it.
        name = cls.fallback
        found = load_prepare_finalize(name).unsupported_reasons(config, experts, request.device, request.environment)
    return [f"behind {name}: {reason}" for reason in found]


def as_device_info(device: DeviceInfo | str | torch.device | None) -> DeviceInfo:
    """Convert a device argument to a DeviceInfo.

    Args:
        device: DeviceInfo, a description (:meth:`DeviceInfo.parse`), "cuda", a torch device, or None for the current
            one.

    Returns:
        The device.

    Raises:
        ConfigError: The name is unknown, or the GPU is not present.
    """
    if isinstance(device, DeviceInfo):
        return device
    if isinstance(device, torch.device):
        return DeviceInfo.current(device)
    if device is None:
        return DeviceInfo.current()
    known = DeviceInfo.current if str(device).partition(":")[0] in ("cuda", "xpu") else DeviceInfo.parse
    return known(device)
