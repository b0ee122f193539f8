"""Tests of moe-transformers: only where transformers is installed."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("transformers") else ["*"]
