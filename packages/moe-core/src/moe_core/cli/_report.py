"""Text report of backend selection: the chosen backend, and the rejections that users can act on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_core.cli._output import bytes_text
from moe_core.selection.report import one_of_each

if TYPE_CHECKING:
    from moe_core.selection.memory import LayerMemory
    from moe_core.selection.report import Alternative, Candidate, SelectionReport

#: number of backends whose reasons are shown
MOST_SHOWN = 4


def verdict(report: SelectionReport) -> str:
    """Return text such as "fp8 on sm100: triton"."""
    how = "" if report.requested == "auto" else f" (asked for {report.requested})"
    return f"{report.scheme} on {report.device}: {report.chosen.backend if report.chosen else 'no backend fits'}{how}"


def reasons(report: SelectionReport) -> list[str]:
    """Return the lines below the verdict: choice, preferred alternatives, and what would help."""
    if report.chosen is None:
        lines = labeled("closest", [line(candidate) for candidate in report.closest[:MOST_SHOWN]])
    else:
        chosen = report.chosen
        lines = [f"  chosen       {chosen.experts.__name__}: {chosen.tested_on(report.device)}"]
        lines += labeled("passed over", [line(candidate) for candidate in _preferred(report)])
    if report.fallback is not None:
        slow = f"no GPU kernel fits; {report.chosen.backend} is a loop driven by the host" if report.chosen else ""
        lines += labeled("warning", [slow])
    lines += labeled("what helps", [helps(alternative) for alternative in report.alternatives])
    lines += labeled("left out", [str(fault) for fault in report.left_out])
    lines += labeled("tuning", [] if report.tuning is None else [str(report.tuning)])
    return lines


def note(report: SelectionReport) -> list[str]:
    """Return the note of the kernel's claims, if any: how it rounds, what it does not use."""
    chosen = report.chosen
    return labeled("note", [chosen.notes] if chosen is not None and chosen.is_kernel and chosen.notes else [])


def layer(report: SelectionReport) -> list[str]:
    """Return lines that state the requested layer."""
    config = report.config
    local = f" (local {config.local_experts})" if config.local_experts < config.num_experts else ""
    dtype = str(config.dtype).removeprefix("torch.")
    sizes = f"E={config.num_experts}{local} k={config.top_k} K={config.hidden_size} N={config.intermediate_size}"
    extras = [config.activation.value, dtype]
    extras += ["biases"] if config.has_bias else []
    extras += [] if config.activation_format.value == "standard" else [config.activation_format.value]
    return [
        f"  layer        {sizes} {' '.join(extras)}",
        f"  weights      {report.weight_key or '16-bit'}",
        f"  activations  {report.activation_key or '16-bit'}",
    ]


def memory(report: SelectionReport, known: LayerMemory) -> str:
    """Return the line on the layer's memory."""
    about = "" if known.exact else "about "
    workspace = "workspace known to its library alone"
    if known.workspace is not None:
        workspace = f"workspace {bytes_text(known.workspace)} for {known.num_tokens} tokens"
    if report.chosen is not None and not report.chosen.experts.claims.cuda_graph:
        workspace = "workspace from torch as it goes"
    load = f"up to {bytes_text(known.load_peak)} at load"
    return f"  memory       weights {about}{bytes_text(known.weights)}, {load}; {workspace}"


def labeled(label: str, texts: list[str]) -> list[str]:
    """Put a label before the first line and indent the others."""
    return [f"  {label if number == 0 else '':<11}  {text}" for number, text in enumerate(texts)]


def _preferred(report: SelectionReport) -> list[Candidate]:
    """Return backends before the chosen one that claim such weights and such a device.

    They were passed over because the installation lacks them or because they do not support the layer.
    """
    if report.requested != "auto" or report.chosen is None:
        return []
    before = report.candidates[: report.candidates.index(report.chosen)]
    made = [
        c
        for c in before
        if c.takes_keys
        and c.backend != report.chosen.backend
        and any(r.reason_against(report.device) is None for r in c.experts.claims.devices)
        and report.config.activation_format in c.experts.claims.formats
    ]
    return one_of_each(made)[:MOST_SHOWN]


def helps(alternative: Alternative) -> str:
    """Return one possible change, how to make it, and what would fit then."""
    how = alternative.command or alternative.argument
    return f"{alternative.change}{f' ({how})' if how else ''}: {alternative.backend} fits"


def line(candidate: Candidate) -> str:
    """Return a backend with every reason against it."""
    return f"{candidate.backend}: {'; '.join(candidate.reasons)}"
