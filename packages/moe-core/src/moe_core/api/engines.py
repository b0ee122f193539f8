"""What packages share that bring the experts into an inference engine, beside the names of :mod:`moe_core` itself.

Such a package replaces a part of an engine that is only known to be there in some of its versions, for the schemes that
the user leaves on: an :class:`Engine` says both, and :meth:`Engine.start` decides, in one line of the log.  Names
change their meaning, or go, with a new major :data:`moe_core.INTERFACE_API` only.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_core.errors import ConfigError, MoEError, did_you_mean
from moe_core.selection.kernel_choice import select_kernel
from moe_core.selection.registry import registry
from moe_core.selection.report import SelectionError
from moe_core.spec.config import FusedMoEConfig
from moe_core.spec.environment import parse_version
from moe_core.spec.quant_key import QuantKey, as_quant_key

__all__ = ["Engine", "EngineChanged", "VersionRange", "log_once", "require", "select_kernel", "unpack_row_pairs"]

_OFF = ("0", "off", "false", "no", "none")
_ON = ("", "1", "on", "true", "yes", "all")


class EngineChanged(MoEError):  # noqa: N818 - an answer, no fault of a caller's
    """Something of an engine's is not as it was tested."""


def require(owner: Any, *names: str) -> None:
    """Checks that an engine's function takes parameters of these names, or its class has them as fields or attributes.

    A function that takes any names, as wrappers do, takes these.  Raises EngineChanged with those that are lacking.
    """
    has = inspect.signature(owner).parameters
    if not inspect.isclass(owner) and any(found.kind is found.VAR_KEYWORD for found in has.values()):
        return
    lacking = [name for name in names if name not in has and not hasattr(owner, name)]
    if lacking:
        verb = "has" if inspect.isclass(owner) else "takes"
        raise EngineChanged(f"{owner.__module__}.{owner.__qualname__} {verb} no {', '.join(lacking)}")


@dataclass(frozen=True)
class VersionRange:
    """The versions of a library that a package was tested with.

    - ``package``: the one that relies on it ("moe-sglang"); ``distribution``: the library's ("sglang")
    - ``lowest`` version that was tested, and the first that was not: ``below``
    """

    package: str
    distribution: str
    lowest: str
    below: str

    def reason_against_version(self, version: str | None = None) -> str | None:
        """Why the library's ``version`` (default: the installed one) is not among those that were tested, or None."""
        tested = f"{self.package} was tested with {self.lowest} or newer, below {self.below}"
        if version is None:
            try:
                version = importlib.metadata.version(self.distribution)
            except importlib.metadata.PackageNotFoundError:
                return f"{self.distribution} is not installed; {tested}"
        if parse_version(self.lowest) <= parse_version(version) < parse_version(self.below):
            return None
        return f"{self.distribution} is {version}; {tested}"


@dataclass(frozen=True)
class Engine(VersionRange):
    """An engine that a package brings the experts to; see the base class.

    ``switch``: the environment variable that turns the package off ("MOE_SGLANG"), or leaves some ``schemes`` on
    """

    switch: str
    schemes: tuple[str, ...]

    def switched_on(self, environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
        """The schemes that the switch leaves on: all where it is unset or "on", none for "off", else those it lists.

        ``environ``: default the process's.  Raises ConfigError for a word that is no scheme.
        """
        text = (os.environ if environ is None else environ).get(self.switch, "")
        names = [name.strip().lower() for name in text.split(",")]
        if names in ([word] for word in _ON):
            return self.schemes
        if names in ([word] for word in _OFF):
            return ()
        for name in names:
            if name not in self.schemes:
                raise ConfigError(
                    f"{self.switch}={text!r} names {name!r}{did_you_mean(name, self.schemes)}, "
                    f"expected on, off, or some of {','.join(self.schemes)}"
                )
        return tuple(scheme for scheme in self.schemes if scheme in names)

    def status(self, environ: Mapping[str, str] | None = None) -> tuple[tuple[str, ...], str]:
        """(the schemes to bring, those that are switched on and installed; the same in words, with the reason if none).

        Raises ConfigError for a switch that says nothing known.
        """
        environ = os.environ if environ is None else environ
        wanted = self.switched_on(environ)
        if not wanted:
            return (), f"{self.package} is off: {self.switch}={environ.get(self.switch)}"
        reason = self.reason_against_version()
        if reason is not None:
            return (), f"{self.package} is off: {reason}"
        installed = registry().scheme_names()
        found = tuple(scheme for scheme in wanted if scheme in installed)
        if not found:
            return (), f"{self.package} is off: none of the schemes {', '.join(wanted)} is installed"
        return found, f"{self.package} is on for {', '.join(found)} ({self.switch}=off turns it off)"

    def start(
        self, logger: logging.Logger, bring: Callable[[tuple[str, ...]], object] | None = None
    ) -> tuple[str, ...]:
        """The schemes to bring; () with the reason in the log where there are none.

        ``bring`` gets them, and raises ImportError, AttributeError or EngineChanged, before it changes anything, where
        the engine lacks what it needs.  One line is logged either way, a warning where the user did not ask for what it
        says.  Raises ConfigError for a switch that says nothing known.
        """
        found, text = self.status()
        asked = bool(found) or not self.switched_on()
        if found and bring is not None:
            try:
                bring(found)
            except (ImportError, AttributeError, EngineChanged) as error:
                version = importlib.metadata.version(self.distribution)
                text = f"{self.package} is off: {self.distribution} {version} lacks what it needs: {error}"
                found, asked = (), False
        logger.log(logging.INFO if asked else logging.WARNING, "%s", text)
        return found

    def report(self, usual: Mapping[str, Sequence[tuple[str, str | None]]]) -> list[str]:
        """What ``moe doctor`` says: a line on the package, then one for each kind of weights that it brings.

        ``usual``: by scheme, the names of weight and activation keys.  A line names the kernel on this machine's device
        for a layer of usual size, or why the engine keeps its own.
        """
        try:
            schemes, text = self.status()
        except ConfigError as error:
            return [error.message]
        config = FusedMoEConfig(num_experts=128, top_k=8, hidden_size=2048, intermediate_size=768)
        said = [text]
        for scheme in schemes:
            for weights, activations in usual.get(scheme, ()):
                found = self._kernel_here(scheme, config, as_quant_key(weights), as_quant_key(activations))
                said.append(f"{scheme} {weights} x {activations or '16-bit'}: {found}")
        return said

    def _kernel_here(
        self, scheme: str, config: FusedMoEConfig, weight_key: QuantKey | None, activation_key: QuantKey | None
    ) -> str:
        try:
            selection = select_kernel(scheme, config, weight_key, activation_key)
        except SelectionError as error:
            return f"left to {self.distribution}, {error.message.partition(': ')[2]}"
        if not selection.report.device.is_gpu:
            return f"left to {self.distribution}, torch sees no GPU"
        return f"{selection.backend} ({selection.experts.__name__})"


@functools.cache
def log_once(logger: logging.Logger, message: str, level: int = logging.INFO) -> None:
    """Log ``message``, the first time that this process has it for ``logger``."""
    logger.log(level, "%s", message)


def unpack_row_pairs(zero_points: Tensor) -> Tensor:
    """4-bit zero points as engines' Triton kernels read them, uint8 [E, rows / 2, groups] with the even row in the low
    half of a byte -> canonical uint8 [E, rows, groups].
    """
    return torch.stack((zero_points & 15, zero_points >> 4), dim=2).flatten(1, 2)
