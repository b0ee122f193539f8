"""The exceptions of the project.

Everything a caller, a checkpoint or an installation can get wrong raises a
subclass of :class:`MoEError` whose message names the thing, what was found,
what was expected and, where there is one, the remedy.  The command line turns
every :class:`MoEError` into one paragraph and exit code 2.

Names come from files that nobody has looked at: what a terminal or a log would
take as a command is escaped here, in every message (:func:`printable`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch

#: longest sentence of an error; a name in a broken file may have megabytes
MAX_MESSAGE = 10_000


def printable(text: str, *, keep: str = "") -> str:
    """``text`` with what is no printable character (control, format and bidi characters, line ends, lone surrogates)
    as an escape like ``\\x1b``, except those in ``keep``.
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
    """Base of every error that this project raises on purpose.

    ``message`` says what is wrong and what to do, in a sentence.  ``details``: what was tried or found on the way, a
    line each; ``str()`` has both, the command line prints the details where it is asked to (``-v``).
    """

    #: characters that are no printable ones and stay; reports have lines
    _KEPT: ClassVar[str] = "\n\t"

    def __init__(self, message: str = "", *, details: str = "") -> None:
        self.message = _shown(message, self._KEPT)
        self.details = printable(details, keep="\n\t")
        super().__init__(self.message)

    def __str__(self) -> str:
        return f"{self.message}\n{self.details}" if self.details else self.message


class ConfigError(MoEError, ValueError):
    """A configuration that contradicts itself or names something unknown."""


class TensorError(MoEError, ValueError):
    """A tensor of the wrong shape, dtype, device, layout or content."""


class CheckpointError(MoEError, ValueError):
    """A checkpoint folder or file that is missing, broken, unsafe or not understood."""

    # one line: what looks like another one comes from a name
    _KEPT = ""


class CheckpointWarning(UserWarning):
    """Something that a checkpoint does not say had to be assumed."""

    def __init__(self, message: str) -> None:
        super().__init__(_shown(message, ""))


class RegistryError(MoEError, LookupError):
    """A scheme, backend or format that is not installed, or is installed wrongly."""


class SchemeNotInstalledError(RegistryError):
    """A known or unknown scheme that no installed package provides."""


class ProtocolVersionError(RegistryError):
    """A plug-in was built for another version of the declared API, or states none."""


class PluginWarning(UserWarning):
    """A plug-in, or a part of one, was left out because it does not work; everything else does."""


class ExpertsLeftOutWarning(UserWarning):
    """A state dict does not hold the experts that moe_core runs."""


class FallbackWarning(UserWarning):
    """No GPU kernel fits a layer on a GPU, which a loop of torch operations driven by the host runs instead."""


class CommunicationError(MoEError, RuntimeError):
    """A call between ranks did not end: a rank has died, hangs, or makes another call."""


class UnsupportedDeviceError(MoEError, RuntimeError):
    """A kernel was started on a device that it cannot run on."""


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """What to add to an error about an unknown name: "; did you mean 'triton'?", nothing if no known one is close.

    Names that begin with it come first, up to four: "fp8" is meant for 'fp8_per_block' and not for 'mxfp8'.
    """
    lower = {other.lower(): other for other in known}
    asked = str(name)[:100].lower()
    longer = [other for other in lower if len(asked) > 2 and other.startswith(asked)]
    close = longer[:4] or difflib.get_close_matches(asked, lower, n=1, cutoff=0.7)
    names = ", ".join(repr(lower[other]) for other in close[:-1])
    return f"; did you mean {names}{' or ' if names else ''}{lower[close[-1]]!r}?" if close else ""


def with_widths_of(name: object, known: Iterable[str]) -> list[str]:
    """Those of ``known`` that may be meant by a name of number formats: widths are not mistyped.

    "w4afp8" is not "w8a8_fp8", but "w8a8" may be.
    """
    digits = re.findall(r"\d", str(name)[:100])
    return [other for other in known if re.findall(r"\d", other)[: len(digits)] == digits]


def check_instance(name: str, value: Any, *kinds: type) -> None:
    """Raise :class:`ConfigError`, with the argument's ``name``, unless ``value`` is of one of ``kinds``.

    True and False are not integers here.
    """
    if isinstance(value, kinds) and (type(value) is not bool or bool in kinds):
        return
    plain = value is None or isinstance(value, (bool, int, float, str, bytes, type))
    found = repr(value)[:100] if plain else f"a {type(value).__module__}.{type(value).__qualname__}"
    expected = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
    raise ConfigError(f"{name} is {found.replace('builtins.', '')}, expected {expected}")


def check_tensor(name: str, value: Any) -> None:
    """Raise :class:`TensorError` unless ``value`` is a dense ``torch.Tensor``."""
    if not isinstance(value, torch.Tensor):
        kind = "None" if value is None else f"a {type(value).__module__}.{type(value).__qualname__}"
        raise TensorError(f"{name} is {kind.replace('builtins.', '')}, expected a torch.Tensor")
    if value.layout is not torch.strided:
        raise TensorError(f"{name} has the layout {value.layout}, expected a dense tensor: {name}.to_dense()")


def check_sign(name: str, tensor: torch.Tensor) -> None:
    """Raise :class:`TensorError` for a view whose memory, which kernels read, holds the negatives of its values."""
    if tensor.is_neg():
        raise TensorError(f"{name} is a view whose sign is still to be changed, expected {name}.resolve_neg()")


def check_shape(name: str, tensor: torch.Tensor, expected: Sequence[int | str]) -> None:
    """Raise :class:`TensorError` unless ``tensor`` is a dense tensor of the expected shape.

    An integer in ``expected`` must match; a string stands for any size and
    is only printed, e.g. ``("E", 2048)``.
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
    """Raise :class:`TensorError` unless ``tensor.dtype`` is one of ``expected``."""
    # every call of a kernel asks: what fits is seen first
    if isinstance(expected, tuple) and getattr(tensor, "dtype", None) in expected:
        return
    check_tensor(name, tensor)
    check_instance("expected", expected, tuple, list)
    if tensor.dtype not in expected:
        raise TensorError(f"{name} has dtype {tensor.dtype}, expected {' or '.join(map(str, expected))}")
