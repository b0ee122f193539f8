"""Files of a checkpoint on the Hub that transformers does not download, and that say how it is quantised."""

from __future__ import annotations

import json
from pathlib import Path

from transformers.utils.hub import cached_file

#: ModelOpt's and AutoGPTQ's, where config.json says nothing of it
_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")


def fetch_settings(folder: Path, repository: str) -> None:
    """Downloads them beside the others, where ``folder`` is a snapshot in the Hub's cache and config.json has none."""
    if folder.parent.name != "snapshots" or Path(repository).is_dir():
        return
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if "quantization_config" in config or "compression_config" in config:
        return
    for name in _FILES:
        cached_file(
            repository,
            name,
            revision=folder.name,
            cache_dir=folder.parents[2],
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_connection_errors=False,
        )
