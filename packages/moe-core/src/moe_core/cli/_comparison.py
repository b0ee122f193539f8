"""``moe bench --compare``: times beside those of an earlier run, and which moved by more than the runs' spread."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from moe_core._support.strict_json import parse_object
from moe_core.errors import CheckpointError, ConfigError

#: bytes of a file of results; that of ten backends and a hundred token counts has 400 KB
MOST_BYTES = 16 << 20
#: what two runs must share to be compared
SAME = (
    *("scheme", "weight_key", "activation_key", "num_experts", "top_k", "hidden_size", "intermediate_size"),
    *("activation", "dtype", "activation_format", "skew", "ranks"),
)


def read_results(path: Path) -> dict[str, Any]:
    """What ``moe bench --output`` wrote, or ``--json`` printed.  Raises ConfigError for anything else."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--compare {str(path)!r} can't be read: {why}") from None
    if len(content) > MOST_BYTES:
        raise ConfigError(f"--compare {path} has more than {MOST_BYTES} bytes, expected what moe bench --output wrote")
    try:
        data = parse_object(content, str(path))
    except CheckpointError as error:
        raise ConfigError(f"--compare: {error.message}") from None
    data.setdefault("skew", 0.0)  # as in runs of before there was any
    results = data.get("results")
    if not isinstance(results, list) or not all(map(_is_result, results)):
        raise ConfigError(
            f"--compare {path} holds no results with tokens, backend, seconds and seconds_p10_p90, expected what "
            "moe bench --output wrote"
        )
    return data


def _is_result(result: object) -> bool:
    if not isinstance(result, dict) or not isinstance(result.get("backend"), str):
        return False
    spread = result.get("seconds_p10_p90")
    times = [result.get("seconds"), *(spread if isinstance(spread, list) and len(spread) == 2 else [None])]
    positive = all(isinstance(t, (int, float)) and not isinstance(t, bool) and 0 < t < math.inf for t in times)
    return positive and isinstance(result.get("tokens"), int)


def compare(data: dict[str, Any], earlier: dict[str, Any], path: Path) -> None:
    """Add to each result of ``data`` that ``earlier`` has too what it was then.

    ``before_seconds``; ``ratio``, now over then; ``moved``: "faster" or "slower" where the ranges from the 10th to the
    90th percentile lie apart, else "".  Raises ConfigError where the layers are not the same.
    """
    for name in SAME:
        if data[name] != earlier.get(name):
            raise ConfigError(
                f"--compare {path}: {name} is {earlier.get(name)!r} there, {data[name]!r} here: two layers' times say "
                "nothing of each other"
            )
    then = {(result["backend"], result["tokens"]): result for result in earlier["results"]}
    data["compared_with"] = {
        "file": str(path),
        **{name: earlier.get(name) for name in ("device_name", "torch", "triton", "moe_core")},
    }
    for result in data["results"]:
        before = then.get((result["backend"], result["tokens"]))
        if before is None:
            continue
        (low, high), (low_then, high_then) = result["seconds_p10_p90"], before["seconds_p10_p90"]
        moved = "slower" if low > high_then else "faster" if high < low_then else ""
        ratio = result["seconds"] / before["seconds"]
        result |= {"before_seconds": before["seconds"], "ratio": ratio, "moved": moved}


def slower(data: dict[str, Any], percent: float) -> list[dict[str, Any]]:
    """The results that got slower, beyond the spread and by more than ``percent``."""
    return [r for r in data["results"] if r.get("moved") == "slower" and r["ratio"] > 1 + percent / 100]
