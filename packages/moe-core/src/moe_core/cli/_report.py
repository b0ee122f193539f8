"""What people read of a selection: the verdict, and the few reasons that they can do something about."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from moe_core.cli._output import bytes_text

if TYPE_CHECKING:
    from moe_core.device import DeviceInfo
    from moe_core.memory import LayerMemory
    from moe_core.selection import Candidate, SelectionReport

#: backends whose reasons are shown
MOST_SHOWN = 4


def verdict(report: SelectionReport) -> str:
    """ "fp8 on sm100: triton"."""
    how = "" if report.requested == "auto" else f" (asked for {report.requested})"
    return f"{report.scheme} on {report.device}: {report.chosen.backend if report.chosen else 'no backend fits'}{how}"


def reasons(report: SelectionReport) -> list[str]:
    """Lines below the verdict: what was chosen, what stood before it, and what would help."""
    if report.chosen is None:
        lines = labelled("closest", [_line(candidate) for candidate in closest(report)])
    else:
        chosen = report.chosen
        lines = [f"  chosen       {chosen.experts.__name__}: {tested_on(chosen.verified_on, report.device)}"]
        lines += labelled("passed over", [_line(candidate) for candidate in _preferred(report)])
    return lines


def tested_on(hardware: tuple[str, ...], device: DeviceInfo) -> str:
    """ "tested on cpu, NVIDIA H200 (sm90); not on sm100"."""
    if not hardware:
        return "not tested on hardware"
    here = any(name == device.arch or name.endswith(f"({device.arch})") for name in hardware)
    return f"tested on {', '.join(hardware)}{'' if here else f'; not on {device.arch}'}"


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


def closest(report: SelectionReport) -> list[Candidate]:
    """What least stands against; of the backend that was asked for, where one was."""
    asked = [c for c in report.candidates if report.requested in ("auto", c.backend)]
    best = _one_each([c for c in asked if c.takes_keys] or asked)
    fewest = min((len(c.reasons) for c in best), default=0)
    return [c for c in best if len(c.reasons) == fewest][:MOST_SHOWN]


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
    return _one_each(made)[:MOST_SHOWN]


def _one_each(candidates: list[Candidate]) -> list[Candidate]:
    """Of each backend the class with the fewest reasons against it."""
    groups = groupby(candidates, lambda candidate: candidate.backend)
    return [min(group, key=lambda candidate: len(candidate.reasons)) for _, group in groups]


def _line(candidate: Candidate) -> str:
    return f"{candidate.backend}: {'; '.join(candidate.reasons)}"
