"""Helpers for packages that integrate the experts into an inference engine.

They add to the names of :mod:`moe_core`. Such a package replaces a part of an engine that is known to exist only in
certain engine versions, for the schemes that the user leaves enabled. An :class:`Engine` describes both, and
:meth:`Engine.start` decides and logs the decision in one line. Names change meaning or are removed only with a new
major version of :data:`moe_core.INTERFACE_API`.
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
    """An engine differs from the versions this package was tested with."""


def require(owner: Any, *names: str) -> None:
    """Check that an engine's function or class has the expected parameters or attributes.

    A function that accepts arbitrary keyword arguments, as wrappers do, passes the check.

    Args:
        owner: Function whose parameters are checked, or class whose fields or attributes are.
        names: Expected names.

    Raises:
        EngineChanged: Some names are missing; the message lists them.
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
    """Range of versions of a library that a package was tested with.

    Attributes:
        package: Package that relies on the library ("moe-sglang").
        distribution: Distribution name of the library ("sglang").
        lowest: Lowest version that was tested.
        below: First version that was not tested.
    """

    package: str
    distribution: str
    lowest: str
    below: str

    def reason_against_version(self, version: str | None = None) -> str | None:
        """Return why a version of the library is outside the tested range, or None.

        Args:
            version: Version of the library. Default: the installed one.

        Returns:
            The reason, or None if the version was tested.
        """
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
    """An inference engine that a package integrates the experts into; see the base class.

    Attributes:
        switch: Environment variable that turns the package off, or limits it to some ``schemes`` ("MOE_SGLANG").
        schemes: All schemes that the package supports.
    """

    switch: str
    schemes: tuple[str, ...]

    def switched_on(self, environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
        """Return the schemes that the environment variable leaves enabled.

        These are all schemes if it is unset or "on", none for "off", and otherwise the ones it lists.

        Args:
            environ: Environment to read. Default: that of the process.

        Returns:
            Names of the enabled schemes.

        Raises:
            ConfigError: The variable contains an unknown scheme.
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
        """Return the schemes to integrate, and a one-line description of the decision.

        Args:
            environ: Environment to read. Default: that of the process.

        Returns:
            The schemes that are both enabled and installed, and the same as text, with the reason if there are none.

        Raises:
            ConfigError: The environment variable has an invalid value.
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
        """Decide which schemes to integrate, integrate them, and log the decision.

        One line is logged in either case. It is a warning if the outcome is not what the user asked for.

        Args:
            logger: Logger for the line.
            bring: Callback that integrates the given schemes. If the engine lacks what it needs, it must raise
                ImportError, AttributeError or EngineChanged before it changes anything.

        Returns:
            The integrated schemes; () if there are none, with the reason in the log.

        Raises:
            ConfigError: The environment variable has an invalid value.
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
        """Return the lines for ``moe doctor``: one on the package, then one per kind of weights.

        Each further line names the kernel that runs a layer of typical size on this machine's device, or states why the
        engine keeps its own.

        Args:
            usual: For each scheme, pairs of names of a weight key and an activation key.

        Returns:
            The lines.
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
    """Log a message once per process and logger.

    Args:
        logger: Logger to use.
        message: Text to log; it is not a format string.
        level: Log level.
    """
    logger.log(level, "%s", message)


def unpack_row_pairs(zero_points: Tensor) -> Tensor:
    """Unpack 4-bit zero points from the layout of engines' Triton kernels.

    Args:
        zero_points: uint8 ``[E, rows / 2, groups]``; each byte holds an even row in its low half and the next row in
            its high half.

    Returns:
        Canonical uint8 ``[E, rows, groups]``.
    """
    return torch.stack((zero_points & 15, zero_points >> 4), dim=2).flatten(1, 2)
