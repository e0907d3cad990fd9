"""`dale evaluate`: a run or weights in a file, the table, the file, and a real SIGKILL in the middle."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from dale.evaluation import Evaluation

from .conftest import Launch, Result

Dale = Callable[..., Result]

SMALL = [
    *("--epochs", "4", "--batch-size", "64", "--steps", "2", "--epsilon", "0.1", "--rho", "1.5"),
    *("--train-size", "512", "--validation-size", "60", "--certification-size", "100"),
    *("--validation-steps", "1", "--validation-examples", "10", "--no-evaluate", "--quiet"),
]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from dale.cli import main

    folder = tmp_path_factory.mktemp("evaluate") / "run"
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["train", *SMALL, "--out", str(folder)]) == 0
    return folder


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original, tmp_path / "run")
    return tmp_path / "run"


def test_prints_the_table_and_writes_the_file(run: Path, dale: Dale) -> None:
    done = dale(
        *("evaluate", run, "--attacks", "fgsm", "pgd5", "noise", "--examples", "60", "--epsilons", "0.05", "0.1"),
        *("--save-examples", "x.safetensors", "--device", "cpu"),
    )
    assert done.code == 0, done.err
    assert done.err == ""
    e = Evaluation.load(run / "evaluation.json")
    for words in ("clean", "fgsm", "pgd5", "worst case", "rho = 1.5", "epsilon", "checks against false robustness"):
        assert words in done.out
    assert f"written to {run / 'evaluation.json'}" in done.out
    assert (e.n, [a.name for a in e.attacks], len(e.curve)) == (60, ["fgsm", "pgd5", "noise"], 2)
    assert e.nominal_loss.rho == 1.5
    assert e.environment["device"] == "cpu"
    assert {"torch", "dale", "python", "cpu"} <= set(e.environment)
    assert Path("x.safetensors").stat().st_size > 60 * 64 * 4
    assert f"{100 * e.worst.value:.2f}%" in done.out


def test_a_quick_look_leaves_the_evaluation_of_more_images_alone(run: Path, dale: Dale) -> None:
    words = ("--attacks", "fgsm", "--no-checks", "--quiet", "--device", "cpu")
    assert dale("evaluate", run, *words, "--examples", "40").code == 0
    whole = (run / "evaluation.json").read_bytes()
    done = dale("evaluate", run, *words, "--examples", "5")
    assert f"written to {run / 'evaluation-5.json'}" in done.out
    assert (run / "evaluation.json").read_bytes() == whole
    assert Evaluation.load(run / "evaluation-5.json").n == 5
    assert dale("evaluate", run, *words, "--examples", "41").code == 0
    assert Evaluation.load(run / "evaluation.json").n == 41


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--attacks", "fgsm", "--epsilon", "0.01"], "evaluation-0.01-fgsm.json"),
        (["--attacks", "fgsm", "noise", "--epsilon", "2/255"], "evaluation-2_255.json"),
        (["--attacks", "fgsm"], "evaluation-fgsm.json"),
        (["--attacks", "noise", "pgd2"], "evaluation-noise-pgd2.json"),
        (["--attacks", "noise", "fgsm", "--seed", "3"], "evaluation-seed3.json"),
        (["--attacks", "fgsm", "noise", "--dataset", "digits"], "evaluation-digits.json"),
        (["--attacks", "fgsm", "--examples", "5"], "evaluation-5-fgsm.json"),
        (["--attacks", "pgd2", "noise", "fgsm"], "evaluation.json"),
    ],
)
def test_another_question_does_not_replace_the_answer_on_file(
    run: Path, dale: Dale, words: list[str], name: str
) -> None:
    common = ("--no-checks", "--quiet", "--device", "cpu", "--examples", "30")
    assert dale("evaluate", run, "--attacks", "fgsm", "noise", *common).code == 0
    before = (run / "evaluation.json").read_bytes()
    done = dale("evaluate", run, *common, *words)
    assert f"written to {run / name}" in done.out
    if name == "evaluation.json":  # all that was asked before, and more
        assert [a.name for a in Evaluation.load(run / name).attacks] == ["pgd2", "noise", "fgsm"]
    else:
        assert "evaluation.json stays as it was" in done.out
        assert (run / "evaluation.json").read_bytes() == before


def test_what_replaces_an_evaluation_has_its_curve_and_its_checks(run: Path, dale: Dale) -> None:
    common = ("--quiet", "--device", "cpu", "--examples", "20", "--attacks", "noise")
    assert dale("evaluate", run, *common, "--epsilons", "0.05", "0.1").code == 0
    first = Evaluation.load(run / "evaluation.json")
    assert dale("evaluate", run, *common, "--no-checks").out.count("evaluation-no_checks.json") == 1
    assert dale("evaluate", run, *common, "fgsm").code == 0
    second = Evaluation.load(run / "evaluation.json")
    assert [a.name for a in second.attacks] == ["noise", "fgsm"]
    assert [p.epsilon for p in second.curve] == [p.epsilon for p in first.curve] == [0.05, 0.1]
    assert {a.name for a in second.alarms} >= {a.name for a in first.alarms} > set()
    assert dale("evaluate", run, *common, "fgsm", "--epsilons", "0.2", "0.1").code == 0
    assert [p.epsilon for p in Evaluation.load(run / "evaluation.json").curve] == [0.05, 0.1, 0.2]
    assert dale("evaluate", run, *common, "--seed", "1", "--epsilons", "0.2").code == 0  # another one, beside it
    assert [p.epsilon for p in Evaluation.load(run / "evaluation-seed1-noise.json").curve] == [0.2]


def test_other_data_under_the_same_name_are_refused(run: Path, dale: Dale) -> None:
    """A file that was replaced: its numbers would stand where the run's own do."""
    first = ["evaluate", "run", "--attacks", "fgsm", "--quiet"]
    assert dale(*first).code == 0
    before = (run / "evaluation.json").read_bytes()
    summary = json.loads((run / "summary.json").read_text())
    summary["splits"]["test images"] = "0" * 16
    (run / "summary.json").write_text(json.dumps(summary))
    refused = dale(*first)
    assert refused.code == 1
    assert "the test split is not the one" in refused.err
    assert "name them with --dataset" in refused.err
    assert (run / "evaluation.json").read_bytes() == before
    assert dale(*first, "--dataset", "digits").code == 0


def test_many_attacks_do_not_make_a_name_too_long_for_a_file(run: Path, dale: Dale) -> None:
    common = ("--no-checks", "--quiet", "--device", "cpu", "--examples", "2", "--attacks")
    assert dale("evaluate", run, *common, "noise").code == 0
    for last in ("", "1"):  # names that begin alike stay apart
        assert dale("evaluate", run, *common, *(f"pgd{k}@0.001-last" for k in range(1, 30)), f"pgd31{last}").code == 0
    assert len(list(run.glob("evaluation-pgd1@0.001_last*.json"))) == 2


def test_weights_in_a_file(run: Path, dale: Dale) -> None:
    words = ("--attacks", "pgd5", "--epsilon", "0.1", "--examples", "60", "--no-checks", "--quiet")
    done = dale(
        *("evaluate", run / "model.safetensors", "--model", "convnet", "--dataset", "digits", "--out", "w.json"), *words
    )
    assert done.code == 0, done.err
    e = Evaluation.load("w.json")
    assert (e.n, e.perturbations["epsilon"], e.nominal_loss.rho) == (60, 0.1, None)
    assert e.worst.value < e.clean.value
    assert not (run / "evaluation.json").exists()


def test_transfer_from_another_run(run: Path, dale: Dale) -> None:
    shutil.copytree(run, "other")
    done = dale(
        *("evaluate", run, "--attacks", "transfer:other", "pgd5", "--epsilon", "0.2", "--examples", "40"),
        *("--no-checks", "--quiet"),
    )
    assert done.code == 0, done.err
    e = Evaluation.load(run / "evaluation.json")
    # from the same weights, and by a hundred adaptive steps: as strong as an attack on the model itself
    assert e["transfer:other"].accuracy.correct <= e["pgd5"].accuracy.correct + 1
    assert e["transfer:other"].gradients_spent == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--attacks", "pgd"], "did you mean 'pgd20'"),
        (["--device", "quantum"], "no device 'quantum' here"),
        (["--examples", "0"], "at least 1"),
        (["--seed", "99999999999999999999"], "seed must be a whole number from 0 to 2^63 - 1"),
        (["--model", "convnet"], "a run knows its model"),
        (["--set", "rotation", "--attacks", "square"], "square searches norm balls"),
        (["--attacks", "transfer:nowhere"], "nowhere"),
    ],
)
def test_bad_requests_are_one_line(run: Path, dale: Dale, words: list[str], message: str) -> None:
    done = dale("evaluate", run, *words)
    assert done.code == 2
    assert message in done.err
    assert len(done.err.splitlines()) == 1


def test_killed_in_the_middle_it_goes_on(run: Path, dale: Dale, launch: Launch, tmp_path: Path) -> None:
    """SIGKILL during the second attack; the same command then takes the rest, and the outcome is the same."""
    words = [
        *("--attacks", "pgd10x2", "square400", "--examples", "200", "--batch-size", "16", "--epsilon", "0.05"),
        *("--no-checks", "--device", "cpu"),
    ]
    partial = run / "evaluation.partial.safetensors"
    child = launch(
        tmp_path,
        *("evaluate", run, *words),
        before="from dale.evaluation import resume; resume._WRITE_EVERY = resume._WRITE_SHARE = 0.0",
    )
    child.wait_until(lambda: partial.exists() and b"square400" in partial.read_bytes()[:4096])
    pid = child.process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    child.process.join()
    assert child.process.exitcode == -signal.SIGKILL
    assert partial.exists()
    assert not (run / "evaluation.json").exists()
    assert "\r" not in (tmp_path / "err").read_text()
    done = dale("evaluate", run, *words)
    assert done.code == 0, done.err
    assert not partial.exists()
    resumed = json.loads((run / "evaluation.json").read_text())
    assert dale("evaluate", run, *words, "--out", "whole.json").code == 0
    whole = json.loads(Path("whole.json").read_text())
    for a, b in zip(resumed["attacks"], whole["attacks"], strict=True):
        for key in ("accuracy", "per_class", "gradients_spent", "queries_spent", "refuted"):
            assert a[key] == b[key]
    assert resumed["worst"] == whole["worst"]


@pytest.mark.verify
def test_mnist(tmp_path: Path, real_data: Path, dale: Dale, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on real MNIST: trained, evaluated, and every check against false robustness made."""
    monkeypatch.setenv("DALE_DATA", str(real_data))
    small = ("--train-size", "3000", "--validation-size", "200", "--validation-examples", "20", "--no-evaluate")
    words = ("train", "--dataset", "mnist", "--epochs", "1", *small, "--quiet", "--out", "run")
    assert dale(*words).code == 0
    done = dale("evaluate", "run", "--attacks", "fgsm", "pgd20", "apgd10-t", "--examples", "64", "--epsilon", "0.1")
    assert done.code == 0, done.err
    assert "worst case" in done.out
    e = Evaluation.load("run/evaluation.json")
    assert e.n == 64
    assert e.worst.value <= e["pgd20"].accuracy.value <= e.clean.value
    assert len(e.alarms) == 8


def test_a_stored_model_by_its_name(
    original: Path, tmp_path: Path, dale: Dale, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dale.training import load_run
    from dale.zoo import store

    store(load_run(original), "small", tmp_path / "zoo")
    monkeypatch.setenv("DALE_ZOO", str(tmp_path / "zoo"))
    common = ("--attacks", "fgsm", "--examples", "60", "--no-checks", "--quiet", "--device", "cpu")
    done = dale("evaluate", "zoo:small", *common)
    assert done.code == 0, done.err
    assert "rho = 1.5" in done.out
    assert "written" not in done.out  # the zoo is not a place for evaluations
    wrong = dale("evaluate", "zoo:smal", *common)
    assert wrong.code == 2
    assert "small" in wrong.err  # the nearest name
    assert dale("evaluate", "zoo:small", "--model", "convnet", *common).code == 2
    certified = dale("certify", "zoo:small", "--alpha", 0.1)
    assert certified.code == 0, certified.err
    assert "The constraint mean clipped loss <= 1.5" in certified.out
