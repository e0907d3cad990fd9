"""How the processes of one group find one another, and not those of a group that has died.

torchrun keeps one store over all its restarts, and what the dead have left in it would be taken for the living: gloo
would call addresses where nobody listens any more, and hang or fail. So every group meets under a name of its own,
which the first process makes up. A process says hello with a word that nobody has used before, and takes the name only
from an answer to that word; the first process answers every hello until all have got hold of the name. The dead say
nothing new: torchrun starts a group when all of the one before it have ended.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

MEETING = 600.0  # seconds that the first process waits for the others: they may still be importing from a slow disk


def meet(fact: Callable[[Store], bool]) -> tuple[Store, Store, int, int, bool]:
    """Meet the others that torchrun started.

    Returns torchrun's store, the group's own part of it, our rank, how many we are, and `fact` of the first store as
    the first process sees it.
    """
    store, rank, size = next(rendezvous("env://"))
    word = secrets.token_hex(8)
    if rank == 0:
        name, known = word, fact(store)
        _answer(store, size, f"{name} {int(known)}", f"dale/met/{name}")
    else:
        store.set(f"dale/hello/{rank}", word)
        name, told = store.get(f"dale/answer/{rank}/{word}").decode().split()  # waits for it
        known = told == "1"
        store.add(f"dale/met/{name}", 1)
    return store, PrefixStore(f"dale/{name}", store), rank, size, known


def _answer(store: Store, size: int, text: str, met: str) -> None:
    """Answer every hello, of the dead too, until all the living have got hold of the text."""
    answered: dict[int, bytes] = {}
    limit = time.monotonic() + MEETING
    while (count := store.add(met, 0) + 1) < size:
        for other in range(1, size):
            hello = f"dale/hello/{other}"
            if store.check([hello]) and answered.get(other) != (word := store.get(hello)):
                answered[other] = word
                store.set(f"dale/answer/{other}/{word.decode()}", text)
        if time.monotonic() > limit:
            raise RuntimeError(f"of {size} processes only {count} came within {MEETING:.0f} s")
        time.sleep(0.002)
