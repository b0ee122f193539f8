from __future__ import annotations

import pickle

import pytest
from moe_core import CheckpointError, ConfigError, MoEError, SchemeNotInstalledError
from moe_core.errors import did_you_mean


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
        ("nonsense", ""),
        (None, ""),
        ("", ""),
    ],
)
def test_did_you_mean(name: object, meant: str) -> None:
    assert did_you_mean(name, ["triton", "torch", "marlin"]) == meant
