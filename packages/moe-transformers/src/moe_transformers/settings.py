"""Quantization settings on the Hub that transformers does not download."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.utils.hub import cached_file

#: settings files of ModelOpt and AutoGPTQ, for checkpoints whose config.json has none
_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
#: download arguments of transformers
_ARGUMENTS = ("cache_dir", "proxies", "local_files_only", "token", "revision", "subfolder")


def fetch_settings(file: Path, repository: str, arguments: Mapping[str, Any]) -> None:
    """Download the settings files next to ``file`` if config.json has no quantization settings.

    Args:
        file: a downloaded file of the checkpoint.
        repository: repository on the Hub, or a local folder.
        arguments: download arguments of transformers.
    """
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
