"""Exceptions, warnings and argument checks of the project.

Every mistake in a call, a checkpoint or an installation raises a subclass of :class:`MoEError`. Its message names the
object, the value found, the value expected and, where there is one, the remedy. The command line prints every
:class:`MoEError` as one paragraph and exits with code 2.

Names in messages can come from untrusted files. Every message therefore escapes the characters that a terminal or a
log would interpret as control sequences (:func:`printable`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

#: Maximum length of an error message: a name in a corrupt file can be megabytes long.
MAX_MESSAGE = 10_000


def printable(text: str, *, keep: str = "") -> str:
    """Replace non-printable characters of ``text`` with escapes like ``\\x1b``.

    Non-printable are control, format and bidi characters, line ends and lone surrogates.

    Args:
        text: The text to escape.
        keep: Characters to leave as they are.

    Returns:
        The escaped text.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else _escape(c) for c in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def _shown(text: str, keep: str) -> str:
    cut = text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}… ({len(text)} characters)"
    return printable(cut, keep=keep)


class MoEError(Exception):
    """Base class of every error that this project raises on purpose.

    Attributes:
        message: One sentence that states what is wrong and what to do.
        details: What was tried or found on the way, one line each. ``str()`` includes the details; the command line
            prints them with ``-v``.
    """

    #: Non-printable characters that are not escaped: reports have several lines.
    _KEPT: ClassVar[str] = "\n\t"

    def __init__(self, message: str = "", *, details: str = "") -> None:
        self.message = _shown(message, self._KEPT)
        self.details = printable(details, keep="\n\t")
        super().__init__(self.message)

    def __str__(self) -> str:
        return f"{self.message}\n{self.details}" if self.details else self.message


class ConfigError(MoEError, ValueError):
    """Configuration that contradicts itself or contains an unknown name."""


class TensorError(MoEError, ValueError):
    """Tensor with the wrong shape, dtype, device, layout or content."""


class CheckpointError(MoEError, ValueError):
    """Checkpoint folder or file that is missing, corrupt, unsafe or not supported."""

    # These messages are one line: a line break can only come from a name in the file.
    _KEPT = ""


class CheckpointWarning(UserWarning):
    """Warning about a value that the checkpoint does not state and the reader assumed."""

    def __init__(self, message: str) -> None:
        super().__init__(_shown(message, ""))


class RegistryError(MoEError, LookupError):
    """Scheme, backend or format that is not installed, or whose installation is broken."""


class SchemeNotInstalledError(RegistryError):
    """Scheme that no installed package provides, whether or not its name is known."""


class ProtocolVersionError(RegistryError):
    """Plug-in that was built for another API version, or that states none."""


class PluginWarning(UserWarning):
    """Warning about a plug-in, or a part of one, that is disabled because it does not work.

    Everything else keeps working.
    """


class ExpertsLeftOutWarning(UserWarning):
    """Warning that a state dict does not contain the experts that moe_core runs."""


class FallbackWarning(UserWarning):
    """Warning that a GPU layer runs as a host-driven loop of torch operations.

    No GPU kernel supports the layer.
    """


class CommunicationError(MoEError, RuntimeError):
    """Collective call that did not finish: a rank died, hangs or made a different call."""


class UnsupportedDeviceError(MoEError, RuntimeError):
    """Kernel launch on a device that the kernel does not support."""


def did_you_mean(name: object, known: Iterable[str], *, cutoff: float = 0.7) -> str:
    """Suggest known names for an unknown one, as a suffix for an error message.

    Names that start with the unknown one come first, up to four: 'fp8' suggests 'fp8_per_block', not 'mxfp8'.

    Args:
        name: The unknown name.
        known: The valid names.
        cutoff: Similarity from which a name is close, 0 to 1.

    Returns:
        Text such as ``"; did you mean 'triton'?"``; an empty string if no known name is close.
    """
    lower = {other.lower(): other for other in known}
    asked = str(name)[:100].lower()
    longer = [other for other in lower if len(asked) > 2 and other.startswith(asked)]
    close = longer[:4] or difflib.get_close_matches(asked, lower, n=1, cutoff=cutoff)
    names = ", ".join(repr(lower[other]) for other in close[:-1])
    return f"; did you mean {names}{' or ' if names else ''}{lower[close[-1]]!r}?" if close else ""


def with_widths_of(name: object, known: Iterable[str]) -> list[str]:
    """Select the names in ``known`` whose bit widths match those in ``name``.

    Users mistype letters of a number format but not its widths: "w4afp8" cannot mean "w8a8_fp8", while "w8a8" can.

    Args:
        name: The unknown name of a number format.
        known: The valid names.

    Returns:
        The names whose digits start with the digits of ``name``.
    """
    digits = re.findall(r"\d", str(name)[:100])
    return [other for other in known if re.findall(r"\d", other)[: len(digits)] == digits]


def check_instance(name: str, value: Any, *kinds: type) -> None:
    """Raise :class:`ConfigError` unless ``value`` is an instance of one of ``kinds``.

    True and False do not count as integers.

    Args:
        name: Name of the argument, for the message.
        value: The value to check.
        *kinds: The accepted types.

    Raises:
        ConfigError: ``value`` has another type.
    """
    if isinstance(value, kinds) and (type(value) is not bool or bool in kinds):
        return
    plain = value is None or isinstance(value, (bool, int, float, str, bytes, type))
    found = repr(value)[:100] if plain else f"a {type(value).__module__}.{type(value).__qualname__}"
    expected = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
    raise ConfigError(f"{name} is {found.replace('builtins.', '')}, expected {expected}")


def check_tensor(name: str, value: Any) -> None:
    """Raise :class:`TensorError` unless ``value`` is a dense ``torch.Tensor``.

    Args:
        name: Name of the argument, for the message.
        value: The value to check.

    Raises:
        TensorError: ``value`` is not a tensor, or is not dense.
    """
    # The command line uses this module without torch.
    import torch

    if not isinstance(value, torch.Tensor):
        kind = "None" if value is None else f"a {type(value).__module__}.{type(value).__qualname__}"
        raise TensorError(f"{name} is {kind.replace('builtins.', '')}, expected a torch.Tensor")
    if value.layout is not torch.strided:
        raise TensorError(f"{name} has the layout {value.layout}, expected a dense tensor: {name}.to_dense()")


def check_sign(name: str, tensor: torch.Tensor) -> None:
    """Raise :class:`TensorError` for a tensor whose negative bit is set.

    Kernels read the memory of such a view directly, which holds the negated values.

    Args:
        name: Name of the argument, for the message.
        tensor: The tensor to check.

    Raises:
        TensorError: The negative bit of ``tensor`` is set.
    """
    if tensor.is_neg():
        raise TensorError(f"{name} has its negative bit set; pass {name}.resolve_neg()")


def check_shape(name: str, tensor: torch.Tensor, expected: Sequence[int | str]) -> None:
    """Raise :class:`TensorError` unless ``tensor`` is dense and has the expected shape.

    Args:
        name: Name of the argument, for the message.
        tensor: The tensor to check.
        expected: The shape, e.g. ``("E", 2048)``. An integer must match; a string stands for any size and is only
            printed.

    Raises:
        TensorError: ``tensor`` is not a dense tensor, or has another shape.
    """
    check_tensor(name, tensor)
    found = tuple(tensor.shape)
    if found == expected:
        return
    check_instance("expected", expected, tuple, list)
    fits = len(found) == len(expected) and all(
        isinstance(want, str) or have == want for have, want in zip(found, expected, strict=False)
    )
    if not fits:
        raise TensorError(f"{name} has shape {list(found)}, expected [{', '.join(map(str, expected))}]")


def check_dtype(name: str, tensor: torch.Tensor, expected: Sequence[torch.dtype]) -> None:
    """Raise :class:`TensorError` unless ``tensor.dtype`` is one of ``expected``.

    Args:
        name: Name of the argument, for the message.
        tensor: The tensor to check.
        expected: The accepted dtypes.

    Raises:
        TensorError: ``tensor`` is not a dense tensor, or has another dtype.
    """
    # Every kernel call runs this check, so the valid case comes first.
    if isinstance(expected, tuple) and getattr(tensor, "dtype", None) in expected:
        return
    check_tensor(name, tensor)
    check_instance("expected", expected, tuple, list)
    if tensor.dtype not in expected:
        raise TensorError(f"{name} has dtype {tensor.dtype}, expected {' or '.join(map(str, expected))}")
