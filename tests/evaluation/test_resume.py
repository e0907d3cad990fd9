"""Evaluations that survive their process: killed in the middle, nothing that was done is done again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from dale.attacks import PGD
from dale.data import Split
from dale.evaluation import Evaluation, evaluate, resume
from dale.evaluation.resume import Ledger, Progress, fingerprint
from dale.perturbations import Linf

BALL = Linf(epsilon=0.15)
ATTACKS = ["pgd10x3", "square50"]
LOGITS = torch.arange(6.0).view(3, 2)
Victim = tuple[nn.Module, Split]


def quiet(model: nn.Module, data: Split, *args: object, **options: object) -> Evaluation:
    return evaluate(model, data, *args, **{"progress": False, "checks": False, **options})  # type: ignore[arg-type]


_KILLED = """
import sys; sys.path.insert(0, sys.argv[2])
from victims import trained
from dale.evaluation import evaluate, resume
from dale.perturbations import Linf
resume._WRITE_EVERY, resume._WRITE_SHARE = 0.0, 0.0
model, split = trained()
attacks = ["pgd10x3", "square50"]
evaluate(model, split.first(200), Linf(epsilon=0.15), attacks, out=sys.argv[1], batch_size=32, checks=False)
"""


ASKED = [0]  # images that the model below and its copies were asked for


class Counting(nn.Module):
    """A model that counts the images it is asked for, and stops the process's work beyond a limit."""

    def __init__(self, model: nn.Module, limit: float = float("inf")) -> None:
        super().__init__()
        self.model, self.limit = model, limit

    def forward(self, x: Tensor) -> Tensor:
        ASKED[0] += len(x)  # the length of an image is not known while tracing: the model is searched as it is
        if ASKED[0] > self.limit:
            raise KeyboardInterrupt
        return self.model(x)

    def __repr__(self) -> str:
        return "Counting()"  # the limit is no part of the evaluation


def test_resume_after_sigkill(victim: Victim, tmp_path: Path) -> None:
    """Killed in the middle, the same evaluation goes on where it was, and ends with the same outcome."""
    partial = tmp_path / "evaluation.partial.safetensors"
    process = subprocess.Popen(
        [sys.executable, "-c", _KILLED, str(tmp_path), str(Path(__file__).parents[1])],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(2400):
            if partial.exists() or process.poll() is not None:
                break
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert partial.exists(), "the evaluation ended before it could be killed"
    model, split = victim[0], victim[1].first(200)
    with safetensors.safe_open(partial, framework="pt") as file:
        done = json.loads(file.metadata()["progress"])["attacks"]
    spent = sum(p["gradients"] for p in done.values())
    assert spent > 0
    resumed = quiet(model, split, BALL, ATTACKS, out=tmp_path, batch_size=32)
    whole = quiet(model, split, BALL, ATTACKS, batch_size=32)
    assert all(torch.equal(resumed.examples[k], whole.examples[k]) for k in whole.examples)
    assert [a.gradients_spent for a in resumed.attacks] == [a.gradients_spent for a in whole.attacks]
    assert [a.queries_spent for a in resumed.attacks] == [a.queries_spent for a in whole.attacks]
    assert not partial.exists()


def test_what_was_done_is_not_done_again(victim: Victim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped at two thirds, the second attempt asks the model for little more than the last third."""
    for name in ("_WRITE_EVERY", "_WRITE_SHARE"):
        monkeypatch.setattr(resume, name, 0.0)
    model, split = victim[0], victim[1].first(160)
    ASKED[0] = 0
    whole = quiet(Counting(model), split, BALL, ATTACKS, batch_size=16)
    needed, ASKED[0] = ASKED[0], 0
    with pytest.raises(KeyboardInterrupt):
        quiet(Counting(model, 2 * needed / 3), split, BALL, ATTACKS, batch_size=16, out=tmp_path)
    ASKED[0] = 0
    resumed = quiet(Counting(model), split, BALL, ATTACKS, batch_size=16, out=tmp_path)
    assert needed / 3 < ASKED[0] < 0.45 * needed  # the clean images and the chunk that was interrupted come again
    assert all(torch.equal(resumed.examples[k], whole.examples[k]) for k in whole.examples)
    assert [a.gradients_spent for a in resumed.attacks] == [a.gradients_spent for a in whole.attacks]


def test_another_evaluation_does_not_use_it(victim: Victim, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "p.safetensors", "one", LOGITS)
    ledger.note("pgd", Progress.fresh(torch.ones(3, dtype=torch.bool)), force=True)
    assert Ledger.open(tmp_path / "p.safetensors", "one", LOGITS).resumed
    assert not Ledger.open(tmp_path / "p.safetensors", "two", LOGITS).resumed
    assert Ledger.open(tmp_path / "p.safetensors", "one", LOGITS + 1e-6).resumed  # another number of threads
    assert not Ledger.open(tmp_path / "p.safetensors", "one", 1.01 * LOGITS).resumed
    assert not Ledger.open(tmp_path / "p.safetensors", "one", LOGITS[:2]).resumed
    (tmp_path / "p.safetensors").write_bytes(b"damaged")
    assert not Ledger.open(tmp_path / "p.safetensors", "one", LOGITS).resumed


class Scaled(nn.Module):
    """A model with a temperature that is in none of its tensors."""

    def __init__(self, model: nn.Module, scale: float = 1.0) -> None:
        super().__init__()
        self.model, self.scale = model, scale

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.model(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("change", ["nothing", "scale", "seed", "set", "images", "attack", "batch_size"])
def test_what_was_begun_otherwise_is_begun_anew(
    change: str, victim: Victim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation that was stopped is no part of one that differs from it in anything."""
    for name in ("_WRITE_EVERY", "_WRITE_SHARE"):
        monkeypatch.setattr(resume, name, 0.0)
    model, split = victim[0], victim[1].first(96)
    first: dict[str, Any] = {"attacks": [PGD(steps=4, step_size=0.1)], "batch_size": 32, "seed": 0}
    ASKED[0] = 0
    with pytest.raises(KeyboardInterrupt):
        quiet(Counting(Scaled(model), 450), split, BALL, out=tmp_path, **first)
    changes: dict[str, dict[str, Any]] = {
        "seed": {"seed": 1},
        "attack": {"attacks": [PGD(steps=4, step_size=0.01)]},
        "batch_size": {"batch_size": 48},
    }
    second = first | changes.get(change, {})
    ball = Linf(epsilon=0.05) if change == "set" else BALL
    data = replace(split, images=split.images.flip(3)) if change == "images" else split
    changed = Counting(Scaled(model, 0.02 if change == "scale" else 1.0))
    ASKED[0] = 0
    fresh = quiet(changed, data, ball, **second)
    needed, ASKED[0] = ASKED[0], 0
    again = quiet(changed, data, ball, out=tmp_path, **second)
    assert (ASKED[0] < needed) == (change == "nothing")
    assert all(torch.equal(again.examples[k], fresh.examples[k]) for k in fresh.examples)


def test_the_fingerprint_is_of_weights_data_and_options() -> None:
    model, data = nn.Linear(3, 2), {"images": torch.zeros(2, 3)}
    first = fingerprint(model, data, {"seed": 0})
    assert fingerprint(model, data, {"seed": 0}) == first
    assert fingerprint(model, data, {"seed": 1}) != first
    assert fingerprint(model, {"images": torch.ones(2, 3)}, {"seed": 0}) != first
    with torch.no_grad():
        model.bias += 1
    assert fingerprint(model, data, {"seed": 0}) != first


def test_progress_round_trip(tmp_path: Path) -> None:
    progress = Progress.fresh(torch.tensor([True, False, True]), torch.arange(6.0).view(3, 2))
    progress.standing[0], progress.blind[2] = False, True
    progress.round, progress.done, progress.gradients, progress.seconds = 2, 1, 17, 1.5
    Ledger(tmp_path / "p.safetensors", "one", LOGITS).note("pgd", progress, force=True)
    again = Ledger.open(tmp_path / "p.safetensors", "one", LOGITS).find("pgd", torch.device("cpu"))
    assert again is not None
    for name in ("standing", "began", "blind", "delta"):
        assert torch.equal(getattr(again, name), getattr(progress, name))
    assert (again.round, again.done, again.gradients, again.seconds) == (2, 1, 17, 1.5)


def test_two_results_in_one_folder_keep_their_own_progress(victim: Victim, tmp_path: Path) -> None:
    """The state lies beside its own result: one evaluation does not write over another's."""
    ASKED[0] = 0
    with pytest.raises(KeyboardInterrupt):
        quiet(Counting(victim[0], 700), victim[1].first(64), BALL, ["fgsm", "pgd20"], out=tmp_path / "a.json")
    assert (tmp_path / "a.partial.safetensors").exists()
    quiet(victim[0], victim[1].first(64), BALL, ["fgsm"], out=tmp_path / "b.json")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.partial.safetensors", "b.json"]
