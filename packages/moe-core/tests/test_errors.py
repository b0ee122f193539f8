from __future__ import annotations

import pickle
import warnings

import pytest
from moe_core import CheckpointError, CheckpointWarning, ConfigError, MoEError, SchemeNotInstalledError
from moe_core.errors import MAX_MESSAGE, did_you_mean, printable, with_widths_of


@pytest.mark.parametrize("kind", [MoEError, ConfigError, CheckpointError, SchemeNotInstalledError])
def test_details_follow_the_sentence(kind: type[MoEError]) -> None:
    plain, long = kind("no such thing"), kind("no such thing", details="a\nb")
    assert (str(plain), plain.details) == ("no such thing", "")
    assert (str(long), long.message, long.details) == ("no such thing\na\nb", "no such thing", "a\nb")
    again = pickle.loads(pickle.dumps(long))
    assert (type(again), str(again), again.message) == (kind, str(long), long.message)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("tritn", "; did you mean 'triton'?"),
        ("TORCH", "; did you mean 'torch'?"),
        ("mar", "; did you mean 'marlin' or 'marlin_fp8'?"),
        ("fp8", "; did you mean 'fp8_per_block'?"),  # and not "mxfp8", which is as close
        ("nonsense", ""),
        (None, ""),
        ("", ""),
    ],
)
def test_did_you_mean(name: object, meant: str) -> None:
    assert did_you_mean(name, ["triton", "torch", "marlin", "marlin_fp8", "mxfp8", "fp8_per_block"]) == meant


HOSTILE = "a\x1b[31mb\x07c\x9bd\u202ee\ud800f\u2028g\x7f\r\0"
SHOWN = r"a\x1b[31mb\x07c\x9bd\u202ee\ud800f\u2028g\x7f\r\x00"


def test_printable() -> None:
    assert printable(HOSTILE) == SHOWN
    assert printable("µ ≤ 専門家 é\n", keep="\n") == "µ ≤ 専門家 é\n"
    assert printable("a\nb") == r"a\nb"


@pytest.mark.parametrize("kind", [MoEError, ConfigError, CheckpointError, SchemeNotInstalledError])
def test_messages_are_printable(kind: type[MoEError]) -> None:
    error = kind(HOSTILE, details=f"{HOSTILE}\n{HOSTILE}")
    assert str(error) == f"{SHOWN}\n{SHOWN}\n{SHOWN}"
    assert error.args == (SHOWN,)
    long = str(kind("x" * 10**6))
    assert len(long) < MAX_MESSAGE + 50
    assert long.endswith("x… (1000000 characters)")


def test_a_name_adds_no_line_to_what_is_said_of_a_checkpoint() -> None:
    assert str(CheckpointError("a\nmoe run: done")) == r"a\nmoe run: done"
    assert str(MoEError("a report\nof lines")) == "a report\nof lines"


def test_warnings_are_printable() -> None:
    with pytest.warns(CheckpointWarning) as caught:
        warnings.warn(f"{HOSTILE}\n", CheckpointWarning, stacklevel=1)
    assert str(caught[0].message) == SHOWN + r"\n"


def test_widths_are_not_mistyped() -> None:
    methods = ["fp8", "w8a8_fp8", "w8a8_int8"]
    assert with_widths_of("w4afp8", methods) == []
    assert with_widths_of("w8a8", methods) == methods[1:]
    assert with_widths_of("pf8", methods) == methods
