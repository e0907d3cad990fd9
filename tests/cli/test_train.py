"""`dale train`: what a run folder holds, configurations, code of the user's, every kind of constraint."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from dale.files import read_tensors
from dale.training import load_run

from .conftest import NET, TINY, Result
from .test_resume import ending

Dale = Callable[..., Result]
STEPLESS = [o for i, o in enumerate(TINY) if "--steps" not in TINY[max(0, i - 1) : i + 1]]
EVALUATED = [option for option in TINY if option != "--no-evaluate"]


@pytest.fixture
def lines(tmp_path: Path) -> Callable[..., list[dict[str, object]]]:
    def read(run: str = "run") -> list[dict[str, object]]:
        return [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]

    return read


def test_a_run_folder_holds_everything(
    dale: Dale, tmp_path: Path, lines: Callable[..., list[dict[str, object]]]
) -> None:
    result = dale("train", *EVALUATED, "--attacks", "fgsm", "pgd2", "--examples", 20, "--out", "run")
    assert result.code == 0
    run = tmp_path / "run"
    assert {p.name for p in run.iterdir()} >= {
        *("config.yaml", "environment.json", "metrics.jsonl", "checkpoints", "model.safetensors"),
        *("last.safetensors", "summary.json", "evaluation.json"),
    }
    assert len(list(run.glob("events.out.tfevents.*"))) in (1, 2)  # of training; of the gallery, unless in one second
    assert len(list((run / "checkpoints").glob("step-*.safetensors"))) == 2
    assert not list(run.rglob("*.tmp"))

    environment = json.loads((run / "environment.json").read_text())
    assert environment["torch"] == torch.__version__
    assert str(tmp_path) not in (run / "environment.json").read_text()

    records = lines()
    assert [r["epoch"] for r in records] == [1, 2, 3]
    for record in records:
        (constraint,) = record["constraints"]  # type: ignore[misc]
        assert len(constraint["multiplier"]) == len(constraint["violation"]) == 1
        assert constraint["violation"][0] == pytest.approx(constraint["measure"][0] - 0.1, abs=1e-6)

    evaluation = json.loads((run / "evaluation.json").read_text())
    assert [a["name"] for a in evaluation["attacks"]][:2] == ["fgsm", "pgd2"]
    assert evaluation["clean"]["n"] == 20
    assert "certificate" in evaluation
    assert evaluation["certificate"]["statement"] in result.out
    assert result.out.splitlines()[-2:] == ["Run folder: run", "Report: run/report.html"]

    summary = json.loads((run / "summary.json").read_text())
    assert summary["selected_epoch"] in (1, 2, 3)
    loaded = load_run(run)
    assert loaded.summary == summary
    assert not loaded.model.training


def test_tensorboard_holds_multiplier_and_violation(dale: Dale, tmp_path: Path) -> None:
    assert dale("train", *TINY, "--out", "run", "--quiet").code == 0
    content = min((tmp_path / "run").glob("events.*")).read_bytes()  # the earlier one: training's
    for name in (b"constraint/loss/multiplier", b"constraint/loss/violation", b"train/loss", b"validation/robust_acc"):
        assert content.count(name) >= 3  # once an epoch, and in the layout


def test_a_pipe_sees_one_line_an_epoch(dale: Dale) -> None:
    err = dale("train", *TINY, "--out", "run").err
    assert "\r" not in err
    assert "\x1b" not in err
    epochs = [line for line in err.splitlines() if line.startswith("epoch ")]
    assert [line.split()[1] for line in epochs] == ["1/3", "2/3", "3/3"]
    assert all("nu " in line and "violation " in line for line in epochs)
    assert "epoch" not in dale("train", *TINY, "--out", "quiet", "--quiet").err


def test_a_configuration_gives_the_same_run_and_options_go_on_top(dale: Dale, tmp_path: Path) -> None:
    first = ["--rho", "0.4", "--epsilon", "8/255", "--optimiser", "{type: SGD, momentum: 0.8}", "--seed", "7"]
    assert dale("train", *TINY, *first, "--out", "first", "--quiet").code == 0
    config = tmp_path / "first" / "config.yaml"
    assert dale("train", "--config", config, "--no-evaluate", "--out", "again", "--quiet").code == 0
    assert ending(tmp_path / "again") == ending(tmp_path / "first")
    assert (tmp_path / "again" / "config.yaml").read_bytes() == config.read_bytes()

    over = ["--epochs", "1", "--rho", "0.9", "--batch-size", "48", "--ema", "0"]
    assert dale("train", "--config", config, "--no-evaluate", "--out", "over", "--quiet", *over).code == 0
    before, after = (yaml.safe_load((tmp_path / run / "config.yaml").read_text()) for run in ("first", "over"))
    assert after["training"]["epochs"] == 1
    assert after["training"]["batch_size"] == 48
    assert after["training"]["averaging"] is None
    assert after["objective"]["options"]["rho"] == 0.9
    for kept in ("optimiser", "schedule", "seed", "validation"):
        assert after["training"][kept] == before["training"][kept]
    assert after["objective"]["perturbations"] == before["objective"]["perturbations"]
    assert after["data"] == before["data"]


OWN = '''
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import dale
from dale.losses import Loss
from dale.samplers import Sampler


def row(perturbations, *, rho=0.5, twist: float = 1.0):
    """A row of one's own."""
    return dale.algorithms.dale(perturbations, rho=rho * twist, steps=1)


@dataclass(frozen=True, kw_only=True)
class Squared(Loss):
    """The squared distance of the probabilities from the truth."""

    non_negative = True

    def value(self, logits, clean, labels):
        return (logits.softmax(dim=1) - F.one_hot(labels, logits.shape[1])).square().sum(dim=1)


@dataclass(frozen=True, kw_only=True)
class Corner(Sampler):
    """Every pixel as bright as it may be."""

    shift: float = 0.1

    def draw(self, problem, key):
        return problem.project(problem.zeros() + self.shift).unsqueeze(0)


CALLS = 0


def turns_bad(logits, clean, labels):
    """Cross-entropy, and NaN from the fifth call on: in the second epoch of three steps."""
    global CALLS
    CALLS += 1
    values = F.cross_entropy(logits, labels, reduction="none")
    return values * float("nan") if CALLS >= 5 else values


class _BadGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (float("nan") if CALLS >= 6 else 1.0)


def bad_gradient(logits, clean, labels):
    """Cross-entropy whose gradient is NaN at the last step of the second epoch, its value never."""
    global CALLS
    CALLS += 1
    return _BadGradient.apply(F.cross_entropy(logits, labels, reduction="none"))
'''


def test_rows_and_models_of_the_users_by_import_path(dale: Dale, tmp_path: Path) -> None:
    (tmp_path / "own_row.py").write_text(OWN)
    (tmp_path / "net.py").write_text(NET)
    own = ["--algorithm", "own_row:row", "--model", "net:Net", "--option", "twist=0.5"]
    assert dale("train", *STEPLESS, *own, "--out", "run", "--quiet").code == 0
    loaded = load_run(tmp_path / "run", trust=True)
    assert type(loaded.model).__name__ == "Net"
    assert loaded.objective.constraints[0].limit == 0.05  # the recipe's 0.1, halved by the row

    config = tmp_path / "run" / "config.yaml"
    for command in (
        ("train", "--config", config, "--out", "other"),
        ("train", "--resume", "run"),
        ("certify", "run"),
    ):
        refused = dale(*command, "--quiet") if command[0] == "train" else dale(*command)
        assert refused.code == 2
        assert len(refused.err.splitlines()) == 1
        assert "names code to import" in refused.err
        assert "--trust" in refused.err
    assert not (tmp_path / "other").exists()
    trusted = dale("train", "--config", config, "--trust", "--no-evaluate", "--out", "other", "--quiet")
    assert trusted.code == 0
    assert ending(tmp_path / "other") == ending(tmp_path / "run")
    assert dale("certify", "run", "--trust").code == 0


def test_losses_and_samplers_of_the_users_by_import_path(dale: Dale, tmp_path: Path) -> None:
    (tmp_path / "own_parts.py").write_text(OWN)
    own = ["--algorithm", "pgd", "--robust-loss", "own_parts:Squared", "--sampler"]
    assert (
        dale("train", *STEPLESS, *own, "{type: 'own_parts:Corner', shift: 0.05}", "--out", "run", "--quiet").code == 0
    )
    objective = load_run(tmp_path / "run", trust=True).objective
    assert (type(objective.robust_loss).__name__, type(objective.sampler).__name__) == ("Squared", "Corner")
    assert objective.sampler.shift == 0.05  # type: ignore[union-attr]
    assert dale("train", *TINY, "--loss", "own_parts:Squared", "--out", "other", "--quiet").code == 0


@pytest.mark.parametrize(("loss", "what"), [("turns_bad", "the loss is"), ("bad_gradient", "the weights are")])
def test_a_loss_that_becomes_nan_stops_training_with_the_last_good_checkpoint_kept(
    loss: str, what: str, dale: Dale, tmp_path: Path
) -> None:
    (tmp_path / f"own_{loss}.py").write_text(OWN)
    own = ["--algorithm", "erm", "--nominal-loss", f"own_{loss}:{loss}", "--validate-every", "3"]
    result = dale("train", *STEPLESS, *own, "--out", "run", "--quiet")
    assert result.code == 1
    assert result.err == (
        f"dale: error: {what} not finite any more in epoch 2; the last good checkpoint, step-000000003.safetensors, "
        "is kept. A lower learning rate (--lr) usually helps\n"
    )
    kept = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert [path.stem for path in kept] == ["step-000000000", "step-000000003"]
    tensors, _ = read_tensors(kept[-1])
    assert all(bool(t.isfinite().all()) for n, t in tensors.items() if n.startswith(("model", "average", "optimiser")))
    # with the cause gone, the run goes on from there to its end
    (tmp_path / f"own_{loss}.py").write_text(OWN.replace("CALLS >= ", "CALLS >= 1000 + "))
    sys.modules.pop(f"own_{loss}")
    assert dale("train", "--resume", "run", "--trust", "--quiet", "--no-evaluate").code == 0


def test_nan_before_the_first_checkpoint_promises_none(dale: Dale, tmp_path: Path) -> None:
    (tmp_path / "own_early.py").write_text(OWN.replace("CALLS >= 5", "CALLS >= 2"))
    own = ["--algorithm", "erm", "--nominal-loss", "own_early:turns_bad"]
    result = dale("train", *STEPLESS, *own, "--out", "run", "--quiet")
    assert (result.code, "there is no checkpoint yet" in result.err) == (1, True)


@pytest.mark.parametrize(
    "text",
    [
        "model: {name: 'evil:Net'}",
        "objective: {name: 'evil:row'}",
        "objective: {options: {loss: 'evil:Loss'}}",
        "objective: {options: {sampler: {type: 'evil:Sampler'}}}",
        "objective: {options: {dataset: 'evil:Sampler'}}",
        "objective: {perturbations: {type: 'evil:Set'}}",
        "objective: {options: {loss: {type: 'evil:init', init: 'evil:x'}}}",
        "training: {augmentation: ['evil:Augmentation']}",
        "training: {optimiser: 'evil:Optimiser'}",
        "objective: {type: 'evil:Objective'}",
    ],
)
def test_a_strangers_configuration_runs_nothing(text: str, dale: Dale, tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("open('executed', 'w').close()\n")
    (tmp_path / "config.yaml").write_text(text)
    result = dale("train", "--config", "config.yaml", "--quiet")
    assert result.code == 2
    assert len(result.err.splitlines()) == 1
    assert not (tmp_path / "executed").exists()


def test_data_paths_that_look_like_code_are_paths(dale: Dale, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("data: {dataset: 'a:b'}")
    assert "unknown dataset 'a:b'" in dale("train", "--config", "config.yaml", "--quiet").err


def test_a_promise_in_accuracy(dale: Dale, lines: Callable[..., list[dict[str, object]]]) -> None:
    assert dale("train", *TINY, "--min-accuracy", 0.9, "--out", "run", "--quiet").code == 0
    (constraint,) = lines()[-1]["constraints"]  # type: ignore[misc]
    assert constraint["name"] == "error"
    assert constraint["limit"] == [pytest.approx(0.1)]


def test_a_multiplier_for_every_class(dale: Dale, lines: Callable[..., list[dict[str, object]]]) -> None:
    assert dale("train", *TINY, "--by", "class", "--out", "run", "--quiet").code == 0
    (constraint,) = lines()[-1]["constraints"]  # type: ignore[misc]
    assert constraint["by"] == "class"
    assert len(constraint["multiplier"]) == len(constraint["violation"]) == 10
    assert len(set(constraint["multiplier"])) > 1


def test_a_multiplier_for_every_group_of_the_users_data(
    dale: Dale, tmp_path: Path, lines: Callable[..., list[dict[str, object]]]
) -> None:
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 3, 120)
    images = np.clip(labels[:, None, None] / 3 + 0.2 * generator.random((120, 10, 8)), 0, 1).astype(np.float32)
    np.savez(tmp_path / "mine.npz", images=images, labels=labels, groups=np.arange(120) % 4)
    sizes = ["--epochs", "2", "--batch-size", "16", "--validation-examples", "5", "--steps", "1"]
    out = ["--out", "run", "--quiet", "--attacks", "fgsm"]
    result = dale("train", "--dataset", "mine.npz", "--by", "group", "--rho", "[0.1, 0.2, 0.3, 0.4]", *sizes, *out)
    assert result.code == 0, result.err
    (constraint,) = lines()[-1]["constraints"]  # type: ignore[misc]
    assert constraint["by"] == "group"
    assert constraint["limit"] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert len(constraint["multiplier"]) == 4
    assert dale("certify", "run").code == 0


def test_rows_side_by_side_can_be_resumed_together(dale: Dale, tmp_path: Path) -> None:
    result = dale("train", *TINY, "--compare", "erm", "pgd", "--out", "run", "--quiet")
    assert result.code == 0
    rows = [line.split()[0] for line in result.out.splitlines()[2:5]]
    assert rows == ["dale", "erm", "pgd"]
    before = {name: ending(tmp_path / "run" / "compare" / name) for name in ("erm", "pgd")}
    again = dale("train", "--resume", "run", "--compare", "erm", "pgd", "--no-evaluate", "--quiet")
    assert again.code == 0
    assert again.out == result.out
    assert {name: ending(tmp_path / "run" / "compare" / name) for name in before} == before


def test_certify_says_what_holds_and_keeps_the_evaluation(dale: Dale, tmp_path: Path) -> None:
    assert dale("train", *EVALUATED, "--attacks", "fgsm", "--examples", 10, "--out", "run", "--quiet").code == 0
    path = tmp_path / "run" / "evaluation.json"
    before = json.loads(path.read_text())
    result = dale("certify", "run", "--alpha", 0.01, "--method", "hoeffding")
    assert result.code == 0
    assert "99%" in result.out
    after = json.loads(path.read_text())
    assert after["certificate"]["statement"] == result.out.strip()
    assert after["certificate"] != before["certificate"]
    assert {k: v for k, v in after.items() if k != "certificate"} == {
        k: v for k, v in before.items() if k != "certificate"
    }
    assert dale("train", *TINY, "--algorithm", "pgd", "--out", "pgd", "--quiet").code == 0
    nothing = dale("certify", "pgd")
    assert (nothing.code, len(nothing.err.splitlines())) == (2, 1)
    assert "without a constraint" in nothing.err


def test_one_process_at_a_time(dale: Dale, tmp_path: Path) -> None:
    from dale.training import RunFolder

    assert dale("train", *TINY, "--out", "run", "--quiet").code == 0
    with RunFolder(tmp_path / "run").locked():
        result = dale("train", "--resume", "run", "--quiet", "--no-evaluate")
    assert (result.code, result.err) == (
        1,
        "dale: error: run is in use: another process is training in it\n",
    )


def test_bfloat16(dale: Dale, lines: Callable[..., list[dict[str, object]]], tmp_path: Path) -> None:
    assert dale("train", *TINY, "--precision", "bfloat16", "--out", "half", "--quiet").code == 0
    assert dale("train", *TINY, "--out", "single", "--quiet").code == 0
    half, single = lines("half")[-1], lines("single")[-1]
    assert half["nominal_loss"] != single["nominal_loss"]
    assert half["nominal_loss"] == pytest.approx(single["nominal_loss"], rel=0.05)
    weights = load_run(tmp_path / "half").model.state_dict()
    assert {t.dtype for t in weights.values()} <= {torch.float32, torch.int64}


def test_help_is_for_people_and_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from dale.cli import main\n"
        "for arguments in (['--help'], ['train', '--help'], ['list', '--help']):\n"
        "    try: main(arguments)\n"
        "    except SystemExit as ended: assert ended.code == 0\n"
        "import dale; dale.__version__; dir(dale)\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    for word in ("train", "certify", "list", "--rho", "--min-accuracy", "--resume", "8/255"):
        assert word in ended.stdout


def test_help_shows_defaults_that_there_are_and_each_once(dale: Dale) -> None:
    train, reproduce = (dale(command, "--help").out for command in ("train", "reproduce"))
    for text in (train, reproduce):
        assert not {"(default: None)", "(default: False)", "(default: [])"} & set(
            re.findall(r"\(default: [^)]*\)", text)
        )
        assert ") (default" not in text
    assert "(default: results)" in reproduce


def test_list(dale: Dale) -> None:
    everything = dale("list")
    assert everything.code == 0
    for name in ("dale-optimal", "trades", "digits", "cifar10", "convnet", "resnet18", "Linf", "Rotation"):
        assert name in everything.out
    for name in ("Chain", "CrossEntropy", "KL", "pgd20", "RandomCrop", "LambdaStar"):
        assert name in everything.out
    only = dale("list", "algorithms").out
    assert "mart" in only
    assert "CrossEntropy" not in only
