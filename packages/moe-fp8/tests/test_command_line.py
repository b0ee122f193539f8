"""``moe`` on the scheme's own checkpoint."""

from __future__ import annotations

from moe_kit.scheme_commands import CommandLineTests


class TestCommandLine(CommandLineTests):
    scheme = "fp8"
