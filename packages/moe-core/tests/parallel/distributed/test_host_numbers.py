"""Numbers that processes of one host tell each other; here threads stand for them."""

from __future__ import annotations

import json
import mmap
import os
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from moe_core.errors import CommunicationError
from moe_core.parallel.distributed import host_numbers
from moe_core.parallel.distributed.communication import Communicating
from moe_core.parallel.distributed.host_numbers import HostNumbers, row_width


def ranks_of(timeout: float) -> Any:
    limit, members = timedelta(seconds=timeout), [4, 5, 7]
    return SimpleNamespace(
        members=members, timeout=limit, communicating=lambda what: Communicating(what, lambda: members, limit)
    )


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> list[HostNumbers]:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 4)
    memory = mmap.mmap(-1, HostNumbers.nbytes(3))
    return [HostNumbers(memory, rank, 3) for rank in range(3)]


def row(*numbers: int) -> list[int]:
    """As wide as a row of three ranks."""
    return [*numbers, *[0] * (row_width(3) - len(numbers))]


def test_every_rank_hears_what_all_say_in_each_call(tables: list[HostNumbers]) -> None:
    found: list[list[list[list[int]]]] = [[], [], []]

    def program(rank: int) -> None:
        for call in range(50):
            if call % 7 == rank:
                time.sleep(0.003)  # longer than others ask without a pause
            numbers = row(*[2**32 - 1 - call, 0, rank][: 1 + call % 3])
            found[rank].append(tables[rank].tell(ranks_of(10), numbers, "ranks count"))

    threads = [threading.Thread(target=program, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [[row(*[2**32 - 1 - call, 0, rank][: 1 + call % 3]) for rank in range(3)] for call in range(50)]
    assert found == [expected] * 3


def test_a_rank_that_says_nothing_is_named_and_waited_for_again(tables: list[HostNumbers]) -> None:
    ranks = ranks_of(0.01)
    for _ in range(2):
        with pytest.raises(CommunicationError, match=r"\[4, 5, 7\]") as error:
            tables[0].tell(ranks, row(9), "ranks count")
        assert "ranks [5, 7] sent no token counts" in error.value.details
    others = [threading.Timer(0.02 * rank, tables[rank].tell, (ranks_of(1), row(rank), "")) for rank in (1, 2)]
    for thread in others:
        thread.start()
    assert tables[0].tell(ranks_of(1), row(9), "ranks count") == [row(9), row(1), row(2)]
    for thread in others:
        thread.join()


def test_what_a_late_rank_goes_by_is_not_taken_back(tables: list[HostNumbers]) -> None:
    with pytest.raises(CommunicationError):
        tables[0].tell(ranks_of(0.01), row(8), "ranks count")
    with pytest.raises(CommunicationError, match="ranks count") as error:
        tables[0].tell(ranks_of(0.01), row(1), "ranks count")
    assert f"a call that sent the token counts {row(8)} has not finished" in error.value.details
    assert f"this one sends {row(1)}" in error.value.details


@pytest.mark.parametrize("host", ["here", "elsewhere"])
def test_ranks_of_several_hosts_have_no_table(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_numbers.socket, "gethostname", lambda: "here")
    monkeypatch.setattr("torch.distributed.get_rank", lambda group: 0)
    files = []

    def exchange(ranks: Any, text: str, what: str) -> list[str]:
        if text.startswith("["):
            files.append(json.loads(text)[1])
            assert os.path.getsize(files[0]) == HostNumbers.nbytes(2)
            return [text, json.dumps([host, ""])]
        assert text == ("yes" if host == "here" else "no")
        return [text, text]

    monkeypatch.setattr(host_numbers, "exchange", exchange)

    class Group:
        """What a weak reference can be to."""

    ranks: Any = SimpleNamespace(group=Group(), size=2, shared=[])
    table = HostNumbers.connect(ranks, "ranks count")
    assert (table is not None) == (host == "here")
    assert HostNumbers.connect(ranks, "ranks count") is table
    assert len(files) == 1
    assert not os.path.exists(files[0])
