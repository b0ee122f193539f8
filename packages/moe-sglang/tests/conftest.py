"""SGLang, or its stand-ins, with the package's hook in place; tests in `in_sglang` only where its files are."""

from __future__ import annotations

import logging
import types
from collections.abc import Iterator

import moe_sglang_engine
import pytest
from moe_core.api.engines import Engine, log_once
from moe_sglang import plugin

collect_ignore_glob = [] if moe_sglang_engine.INSTALLED else ["in_sglang"]


@pytest.fixture(scope="session")
def sglang() -> types.SimpleNamespace:
    """The names of SGLang; the hook is registered and applied, as SGLang does at its start."""
    names = moe_sglang_engine.prepare()
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("MOE_SGLANG", raising=False)
        if not moe_sglang_engine.INSTALLED:
            patched.setattr(Engine, "reason_against_version", lambda self: None)
        plugin.register()
        names.HookRegistry.apply_hooks()
    return names


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """What the package logs in a test."""
    log_once.cache_clear()
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger, level = plugin.LOGGER, plugin.LOGGER.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield messages
    logger.removeHandler(handler)
    logger.setLevel(level)
