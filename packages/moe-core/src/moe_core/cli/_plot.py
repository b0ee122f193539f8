"""The picture of ``moe bench``."""

from __future__ import annotations

import importlib
import io
from pathlib import Path
from typing import Any

from moe_core.cli._output import write_whole


def draw(data: dict[str, Any], path: Path) -> None:
    """Time over token count, one line per backend, and the floor; a PNG whatever the file's name."""
    # by name, so that the types of an optional package are not asked for
    importlib.import_module("matplotlib").use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    results = data["results"]
    backends = list(dict.fromkeys(result["backend"] for result in results))
    for backend in backends:
        mine = sorted((r for r in results if r["backend"] == backend), key=lambda r: int(r["tokens"]))
        axes.plot([r["tokens"] for r in mine], [1e6 * r["seconds"] for r in mine], marker="o", label=backend)
    first = sorted((r for r in results if r["backend"] == backends[0]), key=lambda r: int(r["tokens"]))
    axes.plot(
        [r["tokens"] for r in first],
        [1e6 * r["floor_seconds"] for r in first],
        color="black",
        linestyle="--",
        label="floor of this machine",
    )
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="µs per layer")
    counts = [r["tokens"] for r in first]
    axes.set_xticks(counts, labels=[str(count) for count in counts])
    axes.set_xticks([], minor=True)
    axes.set_title(f"{data['scheme']}, {data['layer']}\n{data['device_name']}, torch {data['torch']}", fontsize=9)
    axes.grid(visible=True, which="major", alpha=0.25)
    axes.legend()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    pyplot.close(figure)
    write_whole(path, buffer.getvalue())
