"""Progress: a bar for a terminal, plain lines at long intervals for a pipe, nothing when not asked."""

from __future__ import annotations

import sys

import pytest
from torch import nn

from dale.data import Split
from dale.evaluation import display, evaluate
from dale.evaluation.display import Display
from dale.perturbations import Linf

BALL = Linf(epsilon=0.15)


def test_lines_in_a_pipe(
    victim: tuple[nn.Module, Split], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(display, "_LINE_EVERY", 0.0)
    evaluate(victim[0], victim[1].first(64), BALL, ["pgd3x2"], batch_size=16, checks=False)
    err = capfd.readouterr().err
    lines = err.splitlines()
    assert "\r" not in err
    assert lines[0].startswith("pgd3x2 1/2: 16 of ")
    assert "accuracy at most" in lines[-1]
    done, total = (int(word) for word in lines[-1].split(": ")[1].split(" examples")[0].split(" of "))
    assert done == total


def test_a_short_evaluation_says_nothing_in_a_pipe(
    victim: tuple[nn.Module, Split], capfd: pytest.CaptureFixture[str]
) -> None:
    evaluate(victim[0], victim[1].first(64), BALL, ["pgd3"], batch_size=16, checks=False)
    assert capfd.readouterr().err == ""


def test_a_bar_on_a_terminal(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Display("pgd", 10, True) as shown:
        assert shown.bar is not None
        shown.bar.mininterval = 0.0
        shown.update("pgd 1/2", 4, 2, 0.5)
    err = capfd.readouterr().err
    assert "pgd 1/2" in err
    assert "accuracy at most 50.00%" in err
    assert "4/6" in err


def test_quiet(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "_LINE_EVERY", 0.0)
    with Display("pgd", 10, False) as shown:
        shown.update("pgd", 10, 0, 1.0)
    assert capfd.readouterr().err == ""
