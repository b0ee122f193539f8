"""Files of a checkpoint on the Hub that transformers does not download, and that say how it is quantised."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.utils.hub import cached_file

#: ModelOpt's and AutoGPTQ's, where config.json says nothing of it
_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
#: how and from where transformers downloads
_ARGUMENTS = ("cache_dir", "proxies", "local_files_only", "token", "revision", "subfolder")


def fetch_settings(file: Path, repository: str, arguments: Mapping[str, Any]) -> None:
    """Downloads them beside ``file`` of ``repository``, as ``arguments`` say, where config.json lacks them."""
    config = file.with_name("config.json")
    if Path(repository).is_dir() or not config.is_file():
        return
    entries = json.loads(config.read_text(encoding="utf-8"))
    if "quantization_config" in entries or "compression_config" in entries:
        return
    for name in _FILES:
        cached_file(
            repository,
            name,
            **{key: arguments[key] for key in _ARGUMENTS if key in arguments},
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_connection_errors=False,
        )
