"""A line an epoch in a pipe, a bar on a terminal."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

from dale.training.progress import Progress, format_record

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


def test_a_tightened_limit_is_the_one_that_the_multiplier_follows() -> None:
    tight = RECORD["constraints"][0] | {
        "limit": [0.1],
        "margin": [0.04],
        "measure": [0.08],
        "violation": [-0.02],
        "multiplier": [1.0],
    }
    line = format_record(RECORD | {"constraints": [tight]})
    assert "loss <= 0.060 (tightened from 0.100): 0.080  nu 1.000, violation +0.020" in line


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
