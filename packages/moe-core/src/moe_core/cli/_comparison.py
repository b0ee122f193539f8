"""``moe bench --compare``: compare times with an earlier run and mark significant changes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from moe_core._support.strict_json import load_settings
from moe_core.errors import ConfigError

#: fields that two runs must share to be comparable
SAME = (
    *("scheme", "weight_key", "activation_key", "num_experts", "top_k", "hidden_size", "intermediate_size"),
    *("activation", "dtype", "activation_format", "skew", "ranks"),
)


def read_results(path: Path) -> dict[str, Any]:
    """Read results that ``moe bench --output`` wrote or ``--json`` printed.

    Raises:
        ConfigError: The file is anything else.
    """
    data = load_settings("--compare", path)
    data.setdefault("skew", 0.0)  # Runs from before the option existed have no skew.
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
    """Add earlier figures to each result of ``data`` that ``earlier`` has too.

    The fields are ``before_seconds``, ``ratio`` (now over before), and ``moved``: "faster" or "slower" if the ranges
    from the 10th to the 90th percentile do not overlap, else "".

    Raises:
        ConfigError: The layers differ.
    """
    for name in SAME:
        if data[name] != earlier.get(name):
            raise ConfigError(
                f"--compare {path}: {name} is {earlier.get(name)!r} there, {data[name]!r} here: times of "
                "different layers cannot be compared"
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
    """Return the results that became slower beyond the spread and by more than ``percent``."""
    return [r for r in data["results"] if r.get("moved") == "slower" and r["ratio"] > 1 + percent / 100]
