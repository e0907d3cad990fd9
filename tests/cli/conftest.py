"""Run the command line: in this process for speed, in a forked one where it is to be killed."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import NamedTuple

import pytest

# a few seconds at most: three epochs of three steps
TINY = [
    *("--epochs", "3", "--batch-size", "32", "--steps", "2"),
    *("--train-size", "96", "--validation-size", "40", "--certification-size", "40"),
    *("--validation-steps", "1", "--validation-examples", "10", "--no-evaluate"),
]

NET = '''
from torch import nn


class Net(nn.Module):
    """BatchNorm and dropout: both keep state that resuming must restore."""

    def __init__(self, channels=1, num_classes=10):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3), nn.Flatten()
        )
        self.head = nn.Linear(128, num_classes)

    def forward(self, x):
        return self.head(self.body(x))
'''


class Result(NamedTuple):
    """What a command gave."""

    code: int
    out: str
    err: str


@pytest.fixture
def dale(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Result]:
    """Run `dale ARGUMENTS` in this process, in an empty folder."""
    from dale.cli import main

    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Result:
        capfd.readouterr()
        try:
            code = main([str(a) for a in arguments])
        except SystemExit as ended:  # argparse ends this way
            code = -1 if not isinstance(ended.code, int) else ended.code
        out, err = capfd.readouterr()
        return Result(code, out, err)

    return run


class Child:
    """A process of its own that runs `dale ARGUMENTS` in a folder; its output goes to files there."""

    def __init__(self, process: ForkServerProcess, folder: Path) -> None:
        self.process, self.folder = process, folder

    def wait(self, seconds: float = 120.0) -> Result:
        """Wait for the end."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            pytest.fail(f"the command did not end within {seconds} s")
        return Result(self.process.exitcode, (self.folder / "out").read_text(), (self.folder / "err").read_text())

    def wait_until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Wait for something to happen, or for the end."""
        limit = time.monotonic() + seconds
        while not condition() and self.process.is_alive() and time.monotonic() < limit:
            time.sleep(0.002)


Launch = Callable[..., Child]


@pytest.fixture
def launch() -> Launch:
    """Start `dale ARGUMENTS` in a process of its own, forked off one that has torch loaded; `before` is code to run."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dale.training", "dale.attacks", "tensorboardX", "torch._dynamo"])

    def start(folder: Path, *arguments: object, before: str = "") -> Child:
        code = f"""
import os, sys
os.chdir({str(folder)!r})
for name, number in (("out", 1), ("err", 2)):
    os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
{before}
from dale.cli import main
sys.exit(main({[str(a) for a in arguments]!r}))
"""
        process = context.Process(target=exec, args=(code, {"__name__": "child"}))
        process.start()
        return Child(process, folder)

    return start
