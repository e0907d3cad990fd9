"""A line an epoch in a pipe, a bar on a terminal, scalars for TensorBoard."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dale.training.progress import Progress, TensorBoard, format_record

RECORD: dict[str, Any] = {
    "epoch": 2,
    "epochs": 5,
    "learning_rate": 0.1,
    "loss": 1.25,
    "robust_loss": None,
    "nominal_loss": 0.5,
    "clean_accuracy": 0.75,
    "robust_accuracy": None,
    "constraints": [
        {
            "name": "loss",
            "limit": [0.1, 0.1],
            "measure": [0.5, None],
            "multiplier": [1.0, 2.0],
            "violation": [0.4, None],
        }
    ],
    "validation": {"clean_accuracy": 0.8, "nominal_loss": 0.6},
}


def test_one_epoch_in_one_line() -> None:
    line = format_record(RECORD)
    assert line == (
        "epoch 2/5  loss 1.250  nominal 0.500  loss <= 0.100 .. 0.100: 0.500  nu 1.000 .. 2.000, violation +0.400  "
        "held-out clean 80.0%, loss 0.600"
    )
    assert "\n" not in line
    absent = RECORD["constraints"][0] | {"measure": [None], "violation": [None], "multiplier": [0.5], "limit": [0.1]}
    assert "loss <= 0.100: -  nu 0.500, violation -" in format_record(RECORD | {"constraints": [absent]})


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_and_a_pipe_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}
    for name, stream in (("terminal", _Terminal()), ("pipe", io.StringIO())):
        monkeypatch.setattr(sys, "stderr", stream)
        with Progress(10, 4, True) as bar:
            for _ in range(3):
                bar.step()
            bar.epoch(RECORD)
            bar.say("warning: something")
        seen[name] = stream.getvalue()
    assert "\r" in seen["terminal"]
    assert "7/10" in seen["terminal"]
    assert "warning: something" in seen["terminal"]
    assert seen["pipe"] == format_record(RECORD) + "\nwarning: something\n"


def test_silence_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(10, 0, False) as bar:
        bar.step()
        bar.epoch(RECORD)
        bar.say("anything")
    assert capsys.readouterr() == ("", "")


def test_tensorboard_leaves_out_what_is_not_a_number(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path, 1)
    board.epoch(RECORD)
    board.close()
    (path,) = tmp_path.glob("events.out.tfevents.*")
    events = list(_events(path.read_bytes()))
    assert events[0].file_version == "brain.Event:2"
    assert (events[1].step, events[1].session_log.status) == (1, 1)  # START: later ones of an earlier try are hidden
    assert all(event.step == 2 for event in events[2:])
    found = {value.tag: value.simple_value for event in events[2:] for value in event.summary.value}
    assert found == {
        "train/loss": 1.25,
        "train/nominal_loss": 0.5,
        "train/learning_rate": pytest.approx(0.1),
        "train/clean_accuracy": 0.75,
        "validation/clean_accuracy": pytest.approx(0.8),
        "validation/nominal_loss": pytest.approx(0.6),
        "constraint/loss/multiplier/0": 1.0,
        "constraint/loss/multiplier/1": 2.0,
        "constraint/loss/violation/0": pytest.approx(0.4),
        "constraint/loss/measure/0": 0.5,
    }


def _events(content: bytes) -> Iterator[Any]:
    """The records of an events file: length, checksum, event, checksum."""
    from tensorboardX.proto.event_pb2 import Event

    while content:
        (length,) = struct.unpack("<Q", content[:8])
        yield Event.FromString(content[12 : 12 + length])
        content = content[16 + length :]


FULL = """
import resource, sys
from pathlib import Path
from dale.errors import DaleError
from dale.training.progress import TensorBoard
resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))
board = TensorBoard(Path(sys.argv[1]), 1)
names = ("learning_rate", "loss", "robust_loss", "nominal_loss", "clean_accuracy", "robust_accuracy")
try:
    for epoch in range(1, 20):
        board.epoch({"epoch": epoch, "constraints": [], **dict.fromkeys(names, 0.5)})
except DaleError as error:
    print(error)
board.close()
"""


def test_tensorboard_on_a_full_disk_is_one_line(tmp_path: Path) -> None:
    """In a process of its own, whose files may not grow beyond 600 bytes."""
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == f"cannot write {tmp_path}/events.*: File too large\n"
