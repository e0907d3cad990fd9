"""`dale certify`: the statement, where it is kept, and what it refuses."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dale.certificates import certify_mean
from dale.losses import CrossEntropy
from dale.training import load_run
from dale.training.validation import predict

from .conftest import Result

Dale = Callable[..., Result]

# a few seconds: a model that has learned something, and 200 images to certify it on
SMALL = [
    *("--epochs", "4", "--batch-size", "64", "--steps", "2", "--epsilon", "0.05", "--rho", "1.5"),
    *("--train-size", "512", "--validation-size", "60", "--certification-size", "200"),
    *("--validation-steps", "1", "--validation-examples", "10", "--attacks", "fgsm", "--examples", "50", "--quiet"),
]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run folder, and what `dale train` printed at its end."""
    from dale.cli import main

    folder, printed = tmp_path_factory.mktemp("certify") / "run", io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["train", *SMALL, "--out", str(folder)]) == 0
    return folder, printed.getvalue()


@pytest.fixture
def trained(original: tuple[Path, str], tmp_path: Path) -> tuple[Path, str]:
    """The same with a folder of one's own."""
    shutil.copytree(original[0], tmp_path / "trained")
    return tmp_path / "trained", original[1]


def statement_of(folder: Path) -> str:
    found: str = json.loads((folder / "evaluation.json").read_text())["certificate"]["statement"]
    return found


def test_the_statement_is_in_the_table_and_in_the_file(trained: tuple[Path, str], dale: Dale) -> None:
    folder, printed = trained
    assert statement_of(folder) in printed
    assert "under attack they are upper bounds" in printed
    result = dale("certify", folder)
    assert (result.code, result.err) == (0, "")
    assert result.out.strip() == statement_of(folder)
    # the rest of the file is left as it was
    assert {"clean", "attacks", "environment", "certificate"} <= set(
        json.loads((folder / "evaluation.json").read_text())
    )


def test_the_bound_is_that_of_the_untouched_split(trained: tuple[Path, str], dale: Dale) -> None:
    folder, _ = trained
    result = dale("certify", folder, "--alpha", "0.2", "--clip", "6", "--method", "empirical_bernstein")
    assert result.code == 0
    run = load_run(folder)
    logits, labels, _ = predict(run.model, run.data().certification, 256, "cpu")
    losses = CrossEntropy()(logits, None, labels).double().numpy()
    expected = certify_mean(losses, alpha=0.2, upper=6.0, method="empirical_bernstein")
    plain = json.loads((folder / "evaluation.json").read_text())["certificate"]
    assert plain["loss"]["bound"] == pytest.approx(expected.bound, rel=1e-6)
    assert plain["loss"]["n"] == 200
    assert (plain["alpha"], plain["clip"], plain["method"]) == (0.2, 6.0, "empirical_bernstein")
    assert expected.statement() in result.out
    assert re.search("confidence 80%.*clipped at B = 6", result.out)


def test_more_confidence_is_a_larger_bound(trained: tuple[Path, str], dale: Dale) -> None:
    bounds = []
    for alpha in (0.5, 0.05, 1e-4):
        assert dale("certify", trained[0], "--alpha", alpha).code == 0
        bounds.append(json.loads((trained[0] / "evaluation.json").read_text())["certificate"]["loss"]["bound"])
    assert bounds[0] < bounds[1] < bounds[2]


def test_what_can_be_proven_is_and_what_cannot_is_not(trained: tuple[Path, str], dale: Dale) -> None:
    """The verdict follows the bound: held against rho = 1.5, which 200 examples prove for one and not for another."""
    folder, _ = trained
    for alpha in ("0.05", "1e-300"):  # at 1e-300 nothing can be proven of 200 examples
        result = dale("certify", folder, "--alpha", alpha)
        plain = json.loads((folder / "evaluation.json").read_text())["certificate"]
        assert plain["holds"] == (plain["loss"]["bound"] <= 1.5)
        assert ("NOT proven" in result.out) == (not plain["holds"])
    assert not plain["holds"]


def test_by_class_every_class_is_certified_jointly(dale: Dale, tmp_path: Path) -> None:
    assert dale("train", *SMALL, "--by", "class", "--no-evaluate", "--out", tmp_path / "run").code == 0
    result = dale("certify", tmp_path / "run")
    assert result.code == 0
    assert "in each of 10 groups jointly" in result.out
    groups = json.loads((tmp_path / "run" / "evaluation.json").read_text())["certificate"]["groups"]
    assert [g["group"] for g in groups] == list(range(10))
    assert all(g["loss"]["alpha"] == pytest.approx(0.005) for g in groups)
    assert sum(g["loss"]["n"] for g in groups) == 200


def test_an_accuracy_that_was_promised_is_certified(dale: Dale, tmp_path: Path) -> None:
    given = [word if word != "--rho" else "--min-accuracy" for word in SMALL]
    given[given.index("--min-accuracy") + 1] = "0.3"
    assert dale("train", *given, "--no-evaluate", "--out", tmp_path / "run").code == 0
    result = dale("certify", tmp_path / "run")
    assert result.code == 0
    assert "accuracy >= 30%" in result.out
    plain = json.loads((tmp_path / "run" / "evaluation.json").read_text())["certificate"]
    assert plain["accuracy_holds"] == (plain["accuracy"]["lower"] >= 0.3)
    assert plain["loss_holds"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--alpha", "0"], "alpha must be between 0 and 1"),
        (["--alpha", "1.5"], "alpha must be between 0 and 1"),
        (["--clip", "1"], "below clip = 1"),
        (["--clip", "-3"], "above 0, got -3"),
        (["--method", "bernoulli"], "betting"),
    ],
)
def test_bad_requests_change_nothing(trained: tuple[Path, str], dale: Dale, arguments: list[str], message: str) -> None:
    before = (trained[0] / "evaluation.json").read_bytes()
    result = dale("certify", trained[0], *arguments)
    assert result.code == 2
    assert message in result.err
    assert len(result.err.strip().splitlines()) == 1
    assert (trained[0] / "evaluation.json").read_bytes() == before


def test_a_run_without_a_promise_and_a_folder_that_is_none(dale: Dale, tmp_path: Path) -> None:
    without = [*SMALL[:4], *SMALL[10:16], "--no-evaluate", "--quiet"]
    assert dale("train", "--algorithm", "erm", *without, "--out", tmp_path / "run").code == 0
    result = dale("certify", tmp_path / "run")
    assert result.code == 2
    assert "nothing was promised" in result.err
    assert dale("certify", tmp_path / "nowhere").code in (1, 2)
