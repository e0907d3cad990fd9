"""An unreachable limit is named, with its level and multiplier; a reachable one is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dale
from dale.training import Validation
from dale.training.diagnosis import stuck


def _history(
    measures: list[float | None], multipliers: list[float], limit: float = 0.1, upper: float | None = None
) -> list[dict[str, Any]]:
    return [
        {"constraints": [{"name": "loss", "limit": [limit], "measure": [m], "multiplier": [nu], "upper": upper}]}
        for m, nu in zip(measures, multipliers, strict=True)
    ]


def test_a_level_that_does_not_fall_while_the_multiplier_grows() -> None:
    (line,) = stuck(_history([0.9, 0.52, 0.51, 0.51, 0.505, 0.503], [1.0, 2.0, 3.0, 4.0, 5.0, 6.25]), 6)
    assert "loss <= 0.1 looks out of reach" in line
    assert "stuck at 0.503" in line
    assert "multiplier has grown to 6.25" in line


@pytest.mark.parametrize(
    ("measures", "multipliers", "epochs"),
    [
        ([0.5, 0.4, 0.3], [1.0, 2.0, 3.0], 3),  # still falling
        ([0.5, 0.5, 0.05], [1.0, 2.0, 3.0], 3),  # met
        ([0.5, 0.5, 0.5], [3.0, 2.0, 1.0], 3),  # the multiplier falls
        ([0.5, 0.5, 0.5], [3.0, 3.0, 3.0], 3),  # the multiplier does not move, and nothing holds it
        ([0.5, 0.5, 0.5], [1.0, 2.0, 3.0], 7),  # too early to say
        ([0.5, 0.5], [1.0, 2.0], 2),  # too short to say
        ([None, 0.5, 0.5], [1.0, 2.0, 3.0], 3),  # a group that was absent
    ],
)
def test_silence_where_there_is_nothing_to_say(
    measures: list[float | None], multipliers: list[float], epochs: int
) -> None:
    assert stuck(_history(measures, multipliers), epochs) == []


@pytest.mark.parametrize("multipliers", [[3.0, 3.0, 3.0], [1.0, 2.0, 3.0]])
def test_a_multiplier_at_its_bound_is_said_to_be_there(multipliers: list[float]) -> None:
    """It cannot grow: what looks out of reach may be so for the bound alone."""
    (line,) = stuck(_history([0.5, 0.5, 0.5], multipliers, upper=3.0), 3)
    assert "loss <= 0.1 looks out of reach: it is stuck at 0.5 while its multiplier is at its bound of 3." in line
    assert "Raise the bound (--dual-upper), train longer" in line
    assert stuck(_history([0.5, 0.5, 0.5], [2.0, 2.0, 2.0], upper=3.0), 3) == []


def test_the_group_is_named() -> None:
    record = {"name": "error", "limit": [0.1, 0.1], "measure": [0.05, 0.5]}
    history = [{"constraints": [record | {"multiplier": [0.0, nu], "upper": None}]} for nu in (1.0, 2.0, 3.0)]
    (line,) = stuck(history, 3)
    assert line.startswith("error <= 0.1 (group 1) looks out of reach")


@pytest.mark.parametrize(
    ("rho", "upper", "reachable"), [(1e-4, None, False), (1e-4, 0.5, False), (2.0, None, True), (2.0, 0.5, True)]
)
def test_a_real_run(
    rho: float, upper: float | None, reachable: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = dale.load_dataset("digits", train_size=128, validation_size=50)
    objective = dale.algorithms.dale(dale.Linf(epsilon=0.1), rho=rho, steps=1, dual_upper=upper)
    run = dale.fit(
        dale.create_model("convnet", data),
        objective,
        data,
        out=tmp_path / "run",
        epochs=8,
        batch_size=64,
        optimiser=dale.training.SGD(learning_rate=0.001 if not reachable else 0.1),
        validation=Validation(steps=1, every=8, examples=10),
    )
    said = [line for line in capsys.readouterr().err.splitlines() if "out of reach" in line]
    if reachable:
        assert said == run.summary["warnings"] == []
        return
    (line,) = run.summary["warnings"]
    last = run.metrics()[-1]["constraints"][0]
    assert f"loss <= {rho:.4g} looks out of reach: it is stuck at {last['measure'][0]:.4g}" in line
    assert f"multiplier {'has grown to' if upper is None else 'is at its bound of'} {last['multiplier'][0]:.3g}" in line
    assert len(said) == 1  # once, while training
    assert said[0].startswith("warning: loss <= 0.0001")
