"""Run folders and the state in them: damage, other models, the log, what is let go of and when."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dale
from dale.errors import CheckpointError, DaleError, UsageError
from dale.files import read_tensors
from dale.training import SGD, AdamW, RunConfig, RunFolder, TrainState
from dale.training.averaging import AveragedModel, Averaging
from dale.training.config import Algorithm, ModelConfig
from dale.training.optimisers import Optimiser
from dale.training.selection import Candidate


def _state(optimiser: Optimiser = AdamW(), width: int = 4, classes: int = 0, steps: int = 2) -> TrainState:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2))
    row = dale.algorithms.dale(dale.Linf(epsilon=0.1), rho=0.5, by="class" if classes else "all")
    average = AveragedModel(model, Averaging(decay=0.9))
    state = TrainState(model, optimiser.build(model), row.initial_duals(classes or None), average)
    for _ in range(steps):
        state.optimiser.zero_grad()
        model(torch.rand(5, 3)).square().sum().backward()
        state.optimiser.step()
        average.update(model)
    state.totals = {"loss": torch.tensor(1.5)}
    state.epoch, state.batch = 1, 2
    state.selection.add(Candidate(1, 0.5, -0.25))
    state.history = [{"epoch": 1, "loss": 0.1, "x": None}]
    return state


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    made.create(RunConfig())
    return made


@pytest.mark.parametrize("optimiser", [SGD(), AdamW(), dale.training.Adadelta()])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_state_is_restored_as_a_whole(folder: RunFolder, optimiser: Optimiser, steps: int) -> None:
    saved = _state(optimiser, steps=steps)
    folder.save_checkpoint(saved, 10)
    fresh = _state(optimiser, steps=0)
    fresh.totals, fresh.epoch, fresh.batch = {}, 0, 0
    assert folder.restore(fresh) == []
    mine, theirs = saved.tensors(), fresh.tensors()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert saved.facts() == fresh.facts()
    if steps:
        assert any(name.startswith("optimiser/") for name in mine)


@pytest.mark.parametrize(
    "other",
    [
        lambda: _state(width=5),
        lambda: _state(classes=3),
        lambda: TrainState(_state().model, _state().optimiser, ()),
    ],
)
def test_a_state_of_something_else_is_one_line(folder: RunFolder, other: Any) -> None:
    folder.save_checkpoint(other(), 10)
    with pytest.raises(CheckpointError, match="does not belong to this run's model and objective") as caught:
        folder.restore(_state())
    assert len(str(caught.value).splitlines()) == 1


def test_two_checkpoints_are_kept_and_later_ones_that_could_not_be_read_go(folder: RunFolder) -> None:
    state = _state()

    def names() -> list[int]:
        return sorted(int(p.stem[-9:]) for p in folder.checkpoints.glob("step-*"))

    for batch in (1, 2, 3):
        state.batch = batch
        folder.save_checkpoint(state, 10)
    assert names() == [12, 13]
    newest = folder.newest
    assert newest is not None
    newest.write_bytes(b"damaged")
    notes = folder.restore(state)
    assert len(notes) == 1
    assert state.batch == 2
    state.epoch, state.batch = 1, 2
    folder.save_checkpoint(state, 10)
    assert names() == [12]
    state.batch = 3
    folder.save_checkpoint(state, 10)
    assert names() == [12, 13]


def test_candidates_stay_as_long_as_one_of_the_two_checkpoints_may_select_them(folder: RunFolder) -> None:
    state = _state(steps=0)
    state.selection.candidates.clear()
    folder.checkpoints.mkdir(exist_ok=True)

    def epoch(number: int, score: float) -> set[int]:
        folder.candidate(number).write_text("weights")
        state.selection.add(Candidate(number, score, -1.0))
        state.epoch, state.batch = number, 0
        folder.save_checkpoint(state, 10)
        return {int(p.stem[-5:]) for p in folder.checkpoints.glob("candidate-*")}

    assert epoch(1, 0.1) == {1}
    assert epoch(2, 0.2) == {1, 2}  # the checkpoint of epoch 1 selects 1
    assert epoch(3, 0.1) == {2}  # 3 is worse than 2, and neither checkpoint knows 1 or 3
    assert epoch(4, 0.3) == {2, 4}


def test_what_a_killed_process_left_half_written_goes(folder: RunFolder) -> None:
    with folder.locked():
        pass
    left = [folder.path / ".config.yaml.abc.tmp", folder.checkpoints / ".step-000000001.safetensors.xyz.tmp"]
    for path in left:
        path.write_text("half")
    with folder.locked():
        assert not any(path.exists() for path in left)
        with pytest.raises(DaleError, match="is in use"), folder.locked():
            pass


def test_a_folder_with_nothing_but_half_written_files_is_free(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".config.yaml.abc.tmp").write_text("half")
    RunFolder(tmp_path / "run").create(RunConfig())
    with pytest.raises(UsageError, match="already exists"):
        RunFolder(tmp_path / "run").create(RunConfig())
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(UsageError, match="already exists"):
        RunFolder(tmp_path / "link").create(RunConfig())


def test_of_two_processes_that_begin_at_once_one_is_turned_away(tmp_path: Path) -> None:
    """The folder is held before anything of the run is in it, and holding it does not make it look taken."""
    first, second = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    with first.locked():
        assert not second.exists
        with pytest.raises(DaleError, match="is in use"), second.locked():
            pass
        first.create(RunConfig())
    with second.locked(), pytest.raises(UsageError, match="already exists"):
        second.create(RunConfig(model=ModelConfig(name="resnet18")))
    assert first.config().model.name == "convnet"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"beta": 6.0}, "objective.options.beta was None, now 6.0"),
        ({"rho": 0.2}, "objective.options.rho was 0.1, now 0.2"),
        ({"limits": [0.5, 0.4]}, r"objective.options.limits\[1\] was 0.3, now 0.4"),
        ({"limits": [0.5]}, r"objective.options.limits was \[0.5, 0.3\], now \[0.5\]"),
    ],
)
def test_what_a_run_was_begun_with_is_what_it_goes_on_with(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"rho": 0.1, "limits": [0.5, 0.3]}
    config = RunConfig(objective=Algorithm(options=options))
    folder = RunFolder(tmp_path / "run")
    folder.create(config)
    folder.require_same(RunConfig(objective=Algorithm(options=dict(reversed(options.items())))))
    with pytest.raises(UsageError, match=message):
        folder.require_same(RunConfig(objective=Algorithm(options=options | change)))


def test_a_run_of_the_users_own_model_is_continued_with_trust(tmp_path: Path) -> None:
    for name, hint in (("convnet", "run`"), ("my_pkg:Net", "run --trust`")):
        run = tmp_path / name.replace(":", "-") / "run"
        run.mkdir(parents=True)
        (run / "config.yaml").write_text(replace(RunConfig(), model=ModelConfig(name=name)).to_yaml())
        with pytest.raises(UsageError) as refused:
            RunFolder(run).create(RunConfig())
        assert str(refused.value).endswith(hint)


def test_a_log_cut_short_by_a_crash(folder: RunFolder) -> None:
    records = [{"epoch": 1, "loss": float("nan")}, {"epoch": 2, "loss": 0.5}]
    folder.write_metrics(records[:1])
    folder.append_metrics(records[1])
    path = folder.path / "metrics.jsonl"
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"epoch": 1, "loss": None},
        {"epoch": 2, "loss": 0.5},
    ]
    path.write_text(path.read_text()[:-5])
    assert folder.metrics() == [{"epoch": 1, "loss": None}]
    path.write_text("broken\n" + '{"epoch": 2}\n')
    with pytest.raises(CheckpointError, match="line 1"):
        folder.metrics()
    path.unlink()
    assert folder.metrics() == []


def test_an_unfinished_run_says_how_to_finish_it(folder: RunFolder) -> None:
    with pytest.raises(CheckpointError, match=r"no model\.safetensors yet; finish it with `dale train --resume"):
        dale.load_run(folder.path)
    with pytest.raises(UsageError, match="is not a run folder"):
        dale.load_run(folder.path / "checkpoints")


@pytest.mark.parametrize("content", [b"", b"\x08\x00\x00\x00\x00\x00\x00\x00{}      ", b"x" * 100])
def test_damaged_weights_are_one_line(folder: RunFolder, content: bytes) -> None:
    (folder.path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        dale.load_run(folder.path)
    assert len(str(caught.value).splitlines()) == 1


def test_a_checkpoint_names_no_path(folder: RunFolder) -> None:
    folder.save_checkpoint(_state(), 10)
    assert folder.newest is not None
    assert str(folder.path).encode() not in folder.newest.read_bytes()
    _, facts = read_tensors(folder.newest)
    assert facts["epoch"] == 1
