"""``moe`` on a gpt-oss checkpoint."""

from __future__ import annotations

import json
from typing import Any

import pytest
from moe_core.cli.main import main
from moe_kit.scheme_commands import CommandLineTests, Original


class TestCommandLine(CommandLineTests):
    scheme = "mxfp4"

    def test_random_tokens_through_the_router(self, original: Original, capsys: pytest.CaptureFixture[str]) -> None:
        """Top-k of the logits with the router's bias, softmax over the k."""
        assert original.source.router_bias is not None
        assert main(["run", str(original.folder), "--tokens", "5", "--json"]) == 0
        data: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert data["format"] == "MXFP4 (gpt-oss)"
        assert (data["routing"], data["random_router_logits"]) == ("checkpoint router logits", False)
        assert (data["selection"]["weight_key"], data["selection"]["activation"]) == ("kMxfp4Static", "swigluoai")
