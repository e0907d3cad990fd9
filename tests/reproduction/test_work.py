"""One run from training to its result, on embedded digits; interrupted, repeated, and configured otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dale.errors import DaleError
from dale.reproduction import read_result
from dale.reproduction.work import work
from dale.training import RunFolder
from dale.training.loop import Trainer


@pytest.fixture
def places(tmp_path):
    return tmp_path / "run", tmp_path / "results" / "one.json"


def test_a_result_says_everything(tiny, places) -> None:
    folder, file = places
    work(tiny, folder, file, device="cpu", paper_mode=True, shared_by=3)
    result = read_result(file)
    plain = result.plain
    assert plain["config"] == tiny.config().to_yaml()
    assert (plain["dataset"], plain["options"], plain["budget"]) == ("mnist", {"rho": 0.5}, "short")
    assert [stage["n"] for stage in plain["stages"]] == [40, 10]
    clean, fgsm = result.accuracy("clean"), result.accuracy("fgsm")
    assert clean is not None
    assert fgsm is not None
    assert 0.0 <= fgsm["accuracy"] <= clean["accuracy"] <= 1.0
    assert clean["n"] == 40
    assert fgsm["lower"] <= fgsm["accuracy"] <= fgsm["upper"]
    assert result.accuracy("pgd2x2")["n"] == 10
    assert plain["stages"][0]["nominal_loss"]["rho"] == 0.5
    training = plain["training"]
    assert training["epochs"] == 2
    assert training["seconds_per_batch"] == pytest.approx(training["seconds_per_epoch"] / 3, abs=1e-4)
    assert len(plain["series"]["multiplier"]) == len(plain["series"]["epoch"]) == 2
    assert plain["series"]["multiplier"][-1] == pytest.approx(training["multipliers"][0][0], rel=1e-4)
    assert set(plain["projection"]["series"]) == {"FGSM", "PGD", "Langevin"}
    assert plain["shared_by"] == 3
    assert {"torch", "cpu", "dale"} <= set(plain["environment"])
    assert set(plain["paper_mode"]["accuracies"]) == {"clean", "fgsm", "pgd"}
    assert plain["paper_mode"]["accuracies"]["clean"]["correct"] == clean["correct"]  # clean images are in eval mode
    assert not (folder / "checkpoints").exists()


def test_a_finished_training_is_not_trained_again(tiny, places) -> None:
    folder, file = places
    work(tiny, folder, file, device="cpu")
    first = read_result(file).plain
    file.unlink()
    before = {name: (folder / name).stat().st_mtime_ns for name in ("model.safetensors", "evaluation.json")}
    (folder / "evaluation-2.json").unlink()  # as if killed in the second stage
    work(tiny, folder, file, device="cpu")
    assert {name: (folder / name).stat().st_mtime_ns for name in before} == before
    again = read_result(file).plain
    assert again["training"] == first["training"]
    assert [s["accuracies"] for s in again["stages"]] == [s["accuracies"] for s in first["stages"]]


def test_an_interrupted_training_is_continued(tiny, places, monkeypatch) -> None:
    folder, file = places
    work(tiny, folder, file, device="cpu")
    whole = read_result(file).plain
    other = folder.parent / "other"
    validate = Trainer._validate

    def killed(self):
        if self.state.epoch == 2:
            raise KeyboardInterrupt
        return validate(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_validate", killed)
        with pytest.raises(KeyboardInterrupt):
            work(tiny, other, file.with_name("other.json"), device="cpu")
    assert RunFolder(other).newest is not None
    assert not file.with_name("other.json").exists()
    work(tiny, other, file.with_name("other.json"), device="cpu")
    continued = read_result(file.with_name("other.json")).plain
    assert continued["series"] == whole["series"]
    assert [s["accuracies"] for s in continued["stages"]] == [s["accuracies"] for s in whole["stages"]]


def test_a_run_of_another_recipe_is_refused(tiny, places) -> None:
    folder, file = places
    work(tiny, folder, file, device="cpu")
    with pytest.raises(DaleError, match="trained by another recipe"):
        work(replace(tiny, epochs=3), folder, file, device="cpu")


def test_rows_without_a_multiplier(tiny, places) -> None:
    folder, file = places
    work(replace(tiny, algorithm="pgd", options={}), folder, file, device="cpu")
    plain = read_result(file).plain
    assert plain["training"]["feasible"] is None
    assert plain["training"]["multipliers"] == []
    assert "multiplier" not in plain["series"]
    assert "projection" not in plain
