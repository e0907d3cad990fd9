"""Several processes that form one run, forked off a server that has torch loaded: seconds less than torchrun's start.

A process runs one function of a module here, with the environment that torchrun would give it; what it returns comes
back, and what it prints lies in files.
"""

from __future__ import annotations

import multiprocessing
import pickle
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["dale.training", "dale.attacks", "dale.evaluation", "tensorboardX", "torch._dynamo"])

_CODE = """
import os, pickle, sys
os.chdir({folder!r})
for name, number in (("out-{rank}", 1), ("err-{rank}", 2)):
    os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
os.environ.update({variables!r})
sys.path[:0] = [{folder!r}, {modules!r}]
{before}
import {module}
result = {module}.{function}(**{arguments!r})
with open("result-{rank}", "wb") as file:
    pickle.dump(result, file)
sys.exit(result if isinstance(result, int) else 0)
"""


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


@dataclass
class Group:
    """Processes of one run."""

    members: list[ForkServerProcess]
    folder: Path

    def wait(self, seconds: float = 120.0) -> list[int]:
        """Wait for all; their exit codes. Whoever is late fails the test."""
        limit = time.monotonic() + seconds
        for member in self.members:
            member.join(max(0.0, limit - time.monotonic()))
        late = [number for number, member in enumerate(self.members) if member.exitcode is None]
        for number in late:
            self.members[number].kill()
            self.members[number].join()
        if late:
            pytest.fail(f"processes {late} did not end within {seconds} s: {[self.err(n) for n in late]}")
        return [int(member.exitcode or 0) for member in self.members]

    def wait_until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Wait for something to happen while all are alive."""
        limit = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > limit or not all(member.is_alive() for member in self.members):
                pytest.fail(f"did not happen: {[self.err(n) for n in range(len(self.members))]}")
            time.sleep(0.002)

    def results(self, seconds: float = 120.0) -> list[Any]:
        """What each returned; all must have ended well."""
        codes = self.wait(seconds)
        assert codes == [0] * len(codes), [self.err(n) for n in range(len(codes))]
        return [pickle.loads((self.folder / f"result-{n}").read_bytes()) for n in range(len(codes))]

    def err(self, number: int) -> str:
        """What a process wrote to stderr."""
        path = self.folder / f"err-{number}"
        return path.read_text(errors="replace") if path.exists() else ""

    def out(self, number: int) -> str:
        """What a process wrote to stdout."""
        return (self.folder / f"out-{number}").read_text()


def start(
    folder: Path,
    size: int,
    module: str,
    function: str,
    *,
    before: str = "",
    variables: dict[str, str] | None = None,
    **arguments: Any,
) -> Group:
    """Start `size` processes (0: one that knows nothing of others) that call `module.function(**arguments)`."""
    folder.mkdir(parents=True, exist_ok=True)
    port = str(free_port())
    members = []
    for rank in range(max(size, 1)):
        environment = {"OMP_NUM_THREADS": "1"}
        if size:
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        code = _CODE.format(
            folder=str(folder),
            modules=str(Path(__file__).parent),
            rank=rank,
            variables=environment | (variables or {}),
            before=before,
            module=module,
            function=function,
            arguments=arguments,
        )
        member = _CONTEXT.Process(target=exec, args=(code, {"__name__": "child"}))
        member.start()
        members.append(member)
    return Group(members, folder)


def command(arguments: list[str]) -> int:
    """Run `dale ARGUMENTS`."""
    from dale.cli import main

    return main(arguments)
