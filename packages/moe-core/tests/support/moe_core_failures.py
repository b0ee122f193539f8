"""Runs the conformance kit on experts that are expected to fail it, or not."""

from __future__ import annotations

from moe_core.interface.experts import FusedMoEExperts
from moe_core.testing import Case, cases_for, run_case

#: what stands before the mistake that explains an output
NAMED = "; the output equals what results when "


def failures(experts: type[FusedMoEExperts], until: str | None = None) -> dict[Case, str]:
    """What each failing case says, up to the first that says ``until``.

    Compilation takes long and is a matter of its own.
    """
    found = {}
    for case in cases_for(experts, device="cpu"):
        if case.check in ("compile", "opcheck"):
            continue
        try:
            run_case(experts, case, device="cpu")
        except (AssertionError, IndexError) as error:
            found[case] = str(error)
            if until is not None and until in found[case]:
                break
    return found


def check_found(experts: type[FusedMoEExperts], message: str, mistake: str | None = None) -> None:
    """Some case fails, says ``message`` and names the ``mistake``, or none; all name class, case and seed."""
    found = failures(experts, until=mistake or message)
    assert found, f"no case of {experts.__name__} fails"
    for case, text in found.items():
        assert text.startswith(f"{experts.__name__}, case {case.id}, seed {case.seed}: ")
    assert any(message in text for text in found.values()), "\n".join(found.values())
    named = [text.partition(NAMED)[2] for text in found.values() if NAMED in text]
    assert any(mistake in text for text in named) if mistake else not named, "\n".join(found.values())
