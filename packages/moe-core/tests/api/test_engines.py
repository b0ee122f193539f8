"""What decides whether a package joins an engine: the switch, the engine's version, the installed schemes."""

from __future__ import annotations

import importlib.metadata
import logging
from dataclasses import dataclass

import pytest
import torch
from moe_core.api.engines import Engine, EngineChanged, log_once, require, unpack_row_pairs
from moe_core.errors import ConfigError

ENGINE = Engine(
    "moe-engine", "an-engine", lowest="0.5.23", below="0.5.25", switch="MOE_ENGINE", schemes=("fp8", "int8", "wna16")
)
TESTED = "moe-engine was tested with 0.5.23 or newer, below 0.5.25"
LOGGER = logging.getLogger("moe_core_test_engine_api")


@pytest.mark.parametrize(
    ("text", "schemes"),
    [
        (None, ("fp8", "int8", "wna16")),
        ("", ("fp8", "int8", "wna16")),
        ("on", ("fp8", "int8", "wna16")),
        ("off", ()),
        ("OFF", ()),
        ("0", ()),
        ("fp8", ("fp8",)),
        ("wna16, FP8", ("fp8", "wna16")),
    ],
)
def test_the_switch(text: str | None, schemes: tuple[str, ...]) -> None:
    assert ENGINE.switched_on({} if text is None else {"MOE_ENGINE": text}) == schemes


@pytest.mark.parametrize("text", ["fp9", "of", "fp8,", "off,fp8"])
def test_a_switch_that_says_nothing_known_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"MOE_ENGINE='.*fp8,int8,wna16"):
        ENGINE.switched_on({"MOE_ENGINE": text})


@pytest.mark.parametrize(
    ("version", "fits"),
    [("0.5.22", False), ("0.5.23", True), ("0.5.23.post1", True), ("0.5.24+cu130", True), ("0.5.25", False)],
)
def test_versions(version: str, fits: bool) -> None:
    reason = ENGINE.reason_against_version(version)
    assert (
        reason is None
        if fits
        else reason == (f"an-engine is {version}; moe-engine was tested with 0.5.23 or newer, below 0.5.25")
    )


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> dict[str, str]:
    """Versions of distributions, which the test states."""
    versions: dict[str, str] = {}

    def version(name: str) -> str:
        try:
            return versions[name]
        except KeyError:
            raise importlib.metadata.PackageNotFoundError(name) from None

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.delenv("MOE_ENGINE", raising=False)
    caplog.set_level(logging.INFO, LOGGER.name)
    return versions


@pytest.mark.parametrize(
    ("version", "switch", "schemes", "line"),
    [
        ("0.5.23", "", ("fp8", "int8", "wna16"), "moe-engine is on for fp8, int8, wna16 (MOE_ENGINE=off turns it off)"),
        ("0.5.23", "int8", ("int8",), "moe-engine is on for int8 (MOE_ENGINE=off turns it off)"),
        ("0.5.23", "off", (), "moe-engine is off: MOE_ENGINE=off"),
        (
            "0.6",
            "",
            (),
            "moe-engine is off: an-engine is 0.6; moe-engine was tested with 0.5.23 or newer, below 0.5.25",
        ),
        (
            None,
            "",
            (),
            f"moe-engine is off: an-engine is not installed; {TESTED}",
        ),
    ],
)
def test_starting_logs_one_line(
    installed: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: str | None,
    switch: str,
    schemes: tuple[str, ...],
    line: str,
) -> None:
    if version is not None:
        installed["an-engine"] = version
    monkeypatch.setenv("MOE_ENGINE", switch)
    assert ENGINE.start(LOGGER) == schemes
    assert [record.getMessage() for record in caplog.records] == [line]


@pytest.mark.parametrize("error", [None, ImportError("no x"), AttributeError("no y"), EngineChanged("no z")])
def test_an_engine_that_lacks_what_is_needed_is_left_alone(
    installed: dict[str, str], caplog: pytest.LogCaptureFixture, error: Exception | None
) -> None:
    installed["an-engine"] = "0.5.23"
    asked = []

    def bring(schemes: tuple[str, ...]) -> None:
        asked.append(schemes)
        if error is not None:
            raise error

    brought = ENGINE.start(LOGGER, bring)
    (line,) = caplog.records
    assert asked == [ENGINE.schemes]
    if error is None:
        assert (brought, line.levelname) == (ENGINE.schemes, "INFO")
    else:
        assert (brought, line.levelname) == ((), "WARNING")
        assert line.getMessage() == f"moe-engine is off: an-engine 0.5.23 lacks what it needs: {error}"


def test_an_error_of_the_package_is_not_the_engines(installed: dict[str, str]) -> None:
    installed["an-engine"] = "0.5.23"
    with pytest.raises(ConfigError, match="another"):
        ENGINE.start(LOGGER, lambda schemes: (_ for _ in ()).throw(ConfigError("another")))


@dataclass
class Layer:
    """What an engine describes a layer by."""

    experts: int

    @property
    def whole(self) -> bool:
        return True


def select(layer: Layer, *, key: str) -> None:
    """What an engine asks."""


def test_what_an_engine_must_have_is_named() -> None:
    require(Layer, "experts", "whole")
    require(select, "layer", "key")
    require(lambda *arguments, **named: None, "layer")
    with pytest.raises(EngineChanged, match=f"{__name__}.Layer"):
        require(Layer, "size", "experts", "rank")
    with pytest.raises(EngineChanged, match=f"{__name__}.select"):
        require(select, "config", "key")


def test_nothing_is_brought_where_the_engine_is_another(installed: dict[str, str]) -> None:
    installed["an-engine"] = "0.6"
    assert ENGINE.start(LOGGER, lambda schemes: pytest.fail("it was asked")) == ()


def test_schemes_that_are_not_installed_are_left_out(
    installed: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    installed["an-engine"] = "0.5.23"
    engine = Engine("moe-engine", "an-engine", "0.5.23", "0.5.25", "MOE_ENGINE", ("fp8", "no_such_scheme"))
    assert engine.start(LOGGER) == ("fp8",)
    engine = Engine("moe-engine", "an-engine", "0.5.23", "0.5.25", "MOE_ENGINE", ("no_such_scheme",))
    assert engine.start(LOGGER) == ()
    assert caplog.records[-1].getMessage() == "moe-engine is off: none of the schemes no_such_scheme is installed"


def test_a_message_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER.name)
    for _ in range(3):
        log_once(LOGGER, "said once: 100 %")
        log_once(LOGGER, "said beside it", logging.WARNING)
    assert [record.getMessage() for record in caplog.records] == ["said once: 100 %", "said beside it"]


def test_zero_points_of_two_rows_in_a_byte() -> None:
    packed = torch.tensor([[[0x21, 0x43], [0x65, 0x87]]], dtype=torch.uint8)
    assert unpack_row_pairs(packed).tolist() == [[[1, 3], [2, 4], [5, 7], [6, 8]]]
