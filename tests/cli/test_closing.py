"""The closing table: what it says of limits, one for all and one for each class."""

from __future__ import annotations

import pytest

from dale.cli.closing import _limits
from dale.constraints import Constraint, accuracy_limit, loss_limit


@pytest.mark.parametrize(
    ("constraint", "means", "errors", "text"),
    [
        (loss_limit(0.1), [0.2], [0.01], "loss <= 0.1"),
        (accuracy_limit(0.9), [0.2], [0.01], "error <= 0.1"),
        (loss_limit(0.5, by="class"), [0.2, 0.4], [0.0, 0.0], "loss <= 0.5 by class"),
        (loss_limit(0.5, by="class"), [0.2, 0.7], [0.0, 0.1], "loss <= 0.5 by class (class 1 0.7)"),
        # within its standard error a limit counts as met; a class that nothing was seen of says nothing
        (loss_limit((0.1, 0.9, 0.9), by="class"), [0.12, 0.4, None], [0.03, 0.0, None], "loss <= 0.1..0.9 by class"),
        (
            loss_limit((0.1, 0.9, 0.3), by="group"),
            [0.626, 0.4, 0.5],
            [0.03, 0.0, 0.0],
            "loss <= 0.1..0.9 by group (group 0 0.626 > 0.1, group 2 0.5 > 0.3)",
        ),
    ],
)
def test_limits_and_who_is_above_them(
    constraint: Constraint, means: list[float | None], errors: list[float | None], text: str
) -> None:
    assert _limits(constraint, means, errors) == text
