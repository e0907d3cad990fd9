"""The living find one another although the dead have left their words behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from torch.distributed import HashStore, PrefixStore, Store

from dale.training import meeting


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> HashStore:
    """One store for threads that take the place of processes, whose number is the thread's name."""
    shared = HashStore()

    def rendezvous(url: str) -> Iterator[tuple[Store, int, int]]:
        rank, size = map(int, threading.current_thread().name.split("/"))
        yield shared, rank, size

    monkeypatch.setattr(meeting, "rendezvous", rendezvous)
    return shared


def group(size: int, fact: bool = False) -> list[tuple[Store, Store, int, int, bool]]:
    found: dict[int, tuple[Store, Store, int, int, bool]] = {}

    def join() -> None:
        met = meeting.meet(lambda store: fact)
        found[met[2]] = met

    members = [threading.Thread(target=join, name=f"{rank}/{size}") for rank in range(size)]
    for member in members:
        member.start()
    for member in members:
        member.join(20)
    return [found[rank] for rank in range(size)]


def test_groups_that_follow_one_another_have_rooms_of_their_own(store: HashStore) -> None:
    """Three groups, of three, two and four: each sees what its own first process wrote, and nothing older."""
    store.set("dale/hello/1", "of somebody who died before it was answered")
    for number, size in enumerate((3, 2, 4)):
        met = group(size, fact=number > 0)
        assert [(rank, count) for _, _, rank, count, _ in met] == [(rank, size) for rank in range(size)]
        rooms = [room for _, room, *_ in met]
        assert all(isinstance(room, PrefixStore) for room in rooms)
        assert not rooms[-1].check(["address"])
        rooms[0].set("address", f"of group {number}")
        assert {room.get("address").decode() for room in rooms} == {f"of group {number}"}
        assert {fact for *_, fact in met} == {number > 0}  # all hear what the first one found


def test_who_does_not_come_is_not_waited_for_for_ever(store: HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "MEETING", 0.05)
    monkeypatch.setattr(threading.current_thread(), "name", "0/2")
    with pytest.raises(RuntimeError, match="of 2 processes only 1 came"):
        meeting.meet(lambda store: False)
