"""Runs the conformance kit on experts that are expected to fail it, or not."""

from __future__ import annotations

from moe_core.experts import FusedMoEExperts
from moe_core.testing import Case, cases_for, run_case


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


def check_found(experts: type[FusedMoEExperts], message: str) -> None:
    """Some case fails and says ``message``; whatever fails names the class, the case and its seed."""
    found = failures(experts, until=message)
    assert found, f"no case of {experts.__name__} fails"
    for case, text in found.items():
        assert text.startswith(f"{experts.__name__}, case {case.id}, seed {case.seed}: ")
    assert any(message in text for text in found.values()), "\n".join(found.values())
