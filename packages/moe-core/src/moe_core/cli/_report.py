"""What people read of a selection: the verdict, and the few reasons that they can do something about."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_core.cli._output import bytes_text
from moe_core.selection.report import one_of_each

if TYPE_CHECKING:
    from moe_core.selection.memory import LayerMemory
    from moe_core.selection.report import Alternative, Candidate, SelectionReport

#: backends whose reasons are shown
MOST_SHOWN = 4


def verdict(report: SelectionReport) -> str:
    """ "fp8 on sm100: triton"."""
    how = "" if report.requested == "auto" else f" (asked for {report.requested})"
    return f"{report.scheme} on {report.device}: {report.chosen.backend if report.chosen else 'no backend fits'}{how}"


def reasons(report: SelectionReport) -> list[str]:
    """Lines below the verdict: what was chosen, what stood before it, and what would help."""
    if report.chosen is None:
        lines = labelled("closest", [line(candidate) for candidate in report.closest[:MOST_SHOWN]])
    else:
        chosen = report.chosen
        lines = [f"  chosen       {chosen.experts.__name__}: {chosen.tested_on(report.device)}"]
        lines += labelled("passed over", [line(candidate) for candidate in _preferred(report)])
    if report.fallback is not None:
        slow = f"no GPU kernel fits; {report.chosen.backend} is a loop driven by the host" if report.chosen else ""
        lines += labelled("warning", [slow])
    lines += labelled("what helps", [helps(alternative) for alternative in report.alternatives])
    lines += labelled("left out", [str(fault) for fault in report.left_out])
    lines += labelled("tuning", [] if report.tuning is None else [str(report.tuning)])
    return lines


def note(report: SelectionReport) -> list[str]:
    """What the kernel's claims say in words, if anything: how it rounds, what it does not use."""
    chosen = report.chosen
    return labelled("note", [chosen.notes] if chosen is not None and chosen.is_kernel and chosen.notes else [])


def layer(report: SelectionReport) -> list[str]:
    """Lines that say what was asked for."""
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


def memory(report: SelectionReport, told: LayerMemory) -> str:
    """The line of what the layer takes."""
    about = "" if told.exact else "about "
    workspace = "workspace known to its library alone"
    if told.workspace is not None:
        workspace = f"workspace {bytes_text(told.workspace)} for {told.num_tokens} tokens"
    if report.chosen is not None and not report.chosen.experts.claims.cuda_graph:
        workspace = "workspace from torch as it goes"
    load = f"up to {bytes_text(told.load_peak)} at load"
    return f"  memory       weights {about}{bytes_text(told.weights)}, {load}; {workspace}"


def labelled(label: str, texts: list[str]) -> list[str]:
    """A label before the first of some lines."""
    return [f"  {label if number == 0 else '':<11}  {text}" for number, text in enumerate(texts)]


def _preferred(report: SelectionReport) -> list[Candidate]:
    """Backends before the chosen one that are made for such weights and such a device: an installation lacks them, or
    the layer is not theirs."""
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
    """One thing that could be changed, how, and what would fit then."""
    how = alternative.command or alternative.argument
    return f"{alternative.change}{f' ({how})' if how else ''}: {alternative.backend} fits"


def line(candidate: Candidate) -> str:
    """A backend, and every reason against it."""
    return f"{candidate.backend}: {'; '.join(candidate.reasons)}"
