"""`fit`: the state of the process is left as it was; loops by hand give the same bits; refusals."""

from __future__ import annotations

import copy
import dataclasses
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dale
from dale import environment
from dale.data import Loader, RandomCrop
from dale.errors import CheckpointError, DataError, UsageError
from dale.files import read_tensors
from dale.training import SGD, Averaging, Constant, Piecewise, RunFolder, Validation
from dale.training.loop import InterruptedTrainingError
from dale.training.steps import PlainStep

QUICK: dict[str, Any] = {
    "epochs": 2,
    "batch_size": 32,
    "validation": Validation(steps=1, examples=10),
    "progress": False,
}


@pytest.fixture(scope="module")
def data() -> dale.Dataset:
    return dale.load_dataset("digits", train_size=96, validation_size=40, certification_size=40)


def _linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def _row(**options: Any) -> dale.Objective:
    return dale.algorithms.dale(dale.Linf(epsilon=0.1), **({"rho": 0.5, "steps": 2} | options))


def test_the_process_is_left_as_it_was(data: dale.Dataset, tmp_path: Path) -> None:
    model = _linear()
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = True
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())
    try:
        dale.fit(model, _row(), data, out=tmp_path / "run", deterministic=True, **QUICK)
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.backends.cudnn.benchmark
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = False
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert sys.float_info.min / 2.0 > 0.0  # denormal numbers are numbers again
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()


def test_training_is_the_loop_of_the_readme(data: dale.Dataset, tmp_path: Path) -> None:
    """The same bits as a loop of one's own over `perturb`, `lagrangian`, SGD and `ascend`."""
    objective = _row(tighten=False, dual_step_size=0.3, noise_scale=0.0)
    model, own = _linear(), _linear()
    schedule = Piecewise(milestones=(1,), drop=0.5)
    options = QUICK | {"optimiser": SGD(learning_rate=0.2, weight_decay=0.01), "schedule": schedule}
    run = dale.fit(model, objective, data, out=tmp_path / "run", averaging=None, seed=5, **options)

    loader, key = Loader(data.train, 32, seed=5), dale.key(5)
    optimiser = torch.optim.SGD(own.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)
    duals, step = objective.initial_duals(10), 0
    for epoch in range(2):
        optimiser.param_groups[0]["lr"] = 0.2 if epoch == 0 else 0.2 * 0.5
        for batch in loader.epoch(epoch):
            own_key = key.fold("step").fold(step)
            delta = objective.perturb(own, batch, own_key)
            seen = objective.lagrangian(own, batch, delta, duals)
            optimiser.zero_grad()
            seen.loss.backward()
            optimiser.step()
            duals = objective.ascend(duals, seen)
            step += 1
        record = run.metrics()[epoch]
        assert record["constraints"][0]["multiplier"] == duals[0].multiplier.tolist()
        assert record["learning_rate"] == (0.2 if epoch == 0 else 0.1)
    assert run.folder.newest is not None
    tensors, _ = read_tensors(run.folder.newest)
    for name, value in own.state_dict().items():
        assert torch.equal(tensors[f"model/{name}"], value)


def test_batches_go_through_the_compiler_of_the_step(
    data: dale.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first step on, which decides whether there is one; the bits are the same."""
    seen: list[str] = []

    def compiler(function: Callable[..., Any]) -> Callable[..., Any]:
        seen.append(function.__name__)
        return function

    class Deciding(PlainStep):
        def __call__(self, *arguments: Any) -> None:
            self.compiler = compiler
            super().__call__(*arguments)

    def make_step(model: nn.Module, *arguments: Any, by_trial: bool) -> tuple[PlainStep, str]:
        return Deciding(*arguments[1:4]), ""

    options = QUICK | {"augmentation": (RandomCrop(padding=1),)}
    plain = dale.fit(_linear(), _row(), data, out=tmp_path / "plain", **options)
    monkeypatch.setattr(sys.modules["dale.training.fit"], "make_step", make_step)
    run = dale.fit(_linear(), _row(), data, out=tmp_path / "run", **options)
    assert seen.count("_load") == 1  # digits: an epoch is one block, and the first is under way when the step decides
    for ours, theirs in zip(run.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_without_an_average_the_raw_weights_are_shipped(data: dale.Dataset, tmp_path: Path) -> None:
    run = dale.fit(_linear(), _row(), data, out=tmp_path / "run", averaging=None, **QUICK)
    tensors, facts = read_tensors(run.folder.newest)  # type: ignore[arg-type]
    assert not any(name.startswith("average/") for name in tensors)
    assert facts["epoch"] == 2
    again = _linear()
    dale.models.load_weights(again, run.path / "last.safetensors")
    for name, value in again.state_dict().items():
        assert torch.equal(tensors[f"model/{name}"], value)


def test_the_selected_weights_are_in_the_model_and_in_the_file(data: dale.Dataset, tmp_path: Path) -> None:
    model = dale.create_model("convnet", data)
    run = dale.fit(model, _row(), data, out=tmp_path / "run", **QUICK)
    assert run.model is model
    assert not model.training
    loaded = dale.load_model(run.path)
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
    images = next(iter(data.test.batches(16))).images
    with torch.no_grad():
        assert torch.equal(loaded(images), model(images))


def test_selection_over_a_run_is_that_of_its_own_records(data: dale.Dataset, tmp_path: Path) -> None:
    run = dale.fit(
        dale.create_model("convnet", data),
        _row(rho=2.2),
        data,
        out=tmp_path / "run",
        **(QUICK | {"epochs": 6, "optimiser": SGD(learning_rate=0.05)}),
    )
    seen = []
    for record in run.metrics():
        held = record["validation"]
        (constraint,) = held["constraints"]
        excess = constraint["measure"][0] - 2.2 - constraint["standard_error"][0]
        seen.append((record["epoch"], held["robust_accuracy"], excess))
    feasible = [c for c in seen if c[2] <= 1e-7] or seen
    assert run.summary["feasible"] == any(c[2] <= 1e-7 for c in seen)
    assert run.summary["score"] == max(score for _, score, _ in feasible)


def test_groups_of_an_objective_reach_the_fit(data: dale.Dataset, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no group labels"):
        dale.fit(_linear(), _row(by="group"), data, out=tmp_path / "run", **QUICK)
    assert not (tmp_path / "run").exists()


def test_bfloat16_that_the_processor_kills_is_refused_before_anything_is_written(
    data: dale.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dale.environment._BFLOAT16", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    environment.require_bfloat16.cache_clear()
    with pytest.raises(UsageError, match="announces instructions for bfloat16 and refuses them; train in float32"):
        dale.fit(_linear(), _row(), data, out=tmp_path / "run", device="cpu", precision="bfloat16", **QUICK)
    assert not (tmp_path / "run").exists()


def test_a_class_that_validation_cannot_see_is_refused_where_each_has_a_limit(
    data: dale.Dataset, tmp_path: Path
) -> None:
    some = replace(data, validation=data.validation.take((data.validation.labels != 3).nonzero()[:, 0]))
    row = dale.algorithms.dale(dale.Linf(epsilon=0.1), rho=0.5, by="class")
    with pytest.raises(UsageError, match=r"no validation example of class 3: .* raise validation_size"):
        dale.fit(_linear(), row, some, out=tmp_path / "run", device="cpu", **QUICK)
    assert not (tmp_path / "run").exists()


def test_a_class_that_the_data_do_not_have_has_no_limit_to_meet(data: dale.Dataset, tmp_path: Path) -> None:
    parts = {
        name: part.take((part.labels != 3).nonzero()[:, 0])
        for name, part in (("train", data.train), ("validation", data.validation))
    }
    row = dale.algorithms.dale(dale.Linf(epsilon=0.1), rho=3.0, by="class")
    run = dale.fit(_linear(), row, replace(data, **parts), out=tmp_path / "run", device="cpu", **QUICK)
    (multipliers,) = run.summary["multipliers"]
    assert multipliers[3] == row.constraints[0].initial  # nothing moved it
    assert all(0.0 <= value < multipliers[3] for place, value in enumerate(multipliers) if place != 3)


def test_unknown_options_are_named(data: dale.Dataset, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"epoch.*options of training are: epochs, batch_size"):
        dale.fit(_linear(), _row(), data, out=tmp_path / "run", epoch=3)
    with pytest.raises(UsageError, match="batch_size must be at least 1"):
        dale.fit(_linear(), _row(), data, out=tmp_path / "run", batch_size=0)


def test_a_run_that_dies_before_its_first_epoch_ends_goes_on_from_its_own_weights(
    data: dale.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that nothing records, of a program that made or loaded them: the checkpoint of no step has them."""
    options = QUICK | {"device": "cpu"}
    whole = dale.fit(_linear(), _row(), data, out=tmp_path / "whole", **options)

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PlainStep, "__call__", die)
        with pytest.raises(KeyboardInterrupt):
            dale.fit(_linear(), _row(), data, out=tmp_path / "run", **options)
    other = _linear()
    torch.nn.init.ones_(other[1].weight)
    again = dale.fit(other, _row(), data, out=tmp_path / "run", resume=True, **options)
    for ours, theirs in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_what_a_model_started_from_is_in_the_configuration(data: dale.Dataset, tmp_path: Path) -> None:
    start = tmp_path / "start.safetensors"
    dale.models.save_weights(dale.create_model("convnet", data, seed=3), start)
    model = dale.create_model("convnet", data, init=start)
    run = dale.fit(model, _row(), data, out=tmp_path / "run", **(QUICK | {"epochs": 1}))
    assert dale.load_run(run.path).config.model.init == str(start)


def test_the_seconds_of_an_epoch_are_those_of_all_its_parts(
    data: dale.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, done = PlainStep.__call__, [0]

    def slow(self: PlainStep, *arguments: Any) -> None:
        time.sleep(0.2)
        step(self, *arguments)
        done[0] += 1
        if done[0] == 2:  # of three in the first epoch
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(PlainStep, "__call__", slow)
    with pytest.raises(InterruptedTrainingError):
        dale.fit(_linear(), _row(), data, out=tmp_path / "run", **QUICK)
    run = dale.fit(_linear(), _row(), data, out=tmp_path / "run", resume=True, **QUICK)
    assert done == [6]
    assert [record["seconds"]["train"] >= 0.6 for record in run.metrics()] == [True, True]
    assert run.summary["seconds"] >= 1.2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 1}, r"one example at a time; .*: ValueError: Expected more than 1 value per channel"),
        ({"batch_size": 4, "accumulate": 4}, "raise batch_size or lower accumulate"),
        ({"batch_size": 5, "accumulate": 3}, "raise batch_size or lower accumulate"),
    ],
)
def test_steps_on_one_example_are_refused_where_batchnorm_cannot_take_them(
    options: dict[str, int], message: str, data: dale.Dataset, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 10))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UsageError, match=message):
        dale.fit(model, dale.algorithms.erm(), data, out=tmp_path / "run", device="cpu", **(QUICK | options))
    assert not (tmp_path / "run").exists()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    # clean and perturbed images in one batch are two
    dale.fit(model, _row(), data, out=tmp_path / "run", device="cpu", **(QUICK | options | {"epochs": 1}))


def test_a_run_is_not_continued_under_another_configuration(data: dale.Dataset, tmp_path: Path) -> None:
    dale.fit(_linear(), _row(), data, out=tmp_path / "run", **QUICK)
    content = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(UsageError, match=r"training\.epochs was 2, now 3"):
        dale.fit(_linear(), _row(), data, out=tmp_path / "run", resume=True, **(QUICK | {"epochs": 3}))
    with pytest.raises(UsageError, match=r"limit was 0\.5, now 0\.7|objective"):
        dale.fit(_linear(), _row(rho=0.7), data, out=tmp_path / "run", resume=True, **QUICK)
    with pytest.raises(UsageError, match="not a run folder"):
        dale.fit(_linear(), _row(), data, out=tmp_path / "none", resume=True, **QUICK)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == content
    again = dale.fit(_linear(), _row(), data, out=tmp_path / "run", resume=True, **QUICK)
    assert again.summary["selected_epoch"] in (1, 2)


def test_a_run_is_not_continued_on_other_data(data: dale.Dataset, tmp_path: Path) -> None:
    """The same number of images, the same labels, other pixels: a file that was replaced under its name."""
    run = dale.fit(_linear(), _row(), data, out=tmp_path / "run", **QUICK)
    other = replace(data, train=replace(data.train, images=data.train.images.flip(3)))
    with pytest.raises(DataError, match=r"the train split is not the one .*: it cannot go on with it"):
        dale.fit(_linear(), _row(), other, out=tmp_path / "run", resume=True, **QUICK)
    assert run.folder.environment()["splits"] == run.summary["splits"]


def test_a_finished_run_without_checkpoints_is_not_begun_anew(data: dale.Dataset, tmp_path: Path) -> None:
    run = dale.fit(_linear(), _row(), data, out=tmp_path / "run", **QUICK)
    shutil.rmtree(run.folder.checkpoints)
    weights = (run.path / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="is finished, and its checkpoints are gone"):
        dale.fit(_linear(), _row(), data, out=tmp_path / "run", resume=True, **QUICK)
    assert (run.path / "model.safetensors").read_bytes() == weights
    assert len(run.metrics()) == 2


def test_a_model_that_no_checkpoint_could_hold_is_refused_before_anything_is_written(
    data: dale.Dataset, tmp_path: Path
) -> None:
    model = _linear()
    model.register_buffer("spectrum", torch.zeros(3, dtype=torch.complex128))
    with pytest.raises(UsageError, match="spectrum"):
        dale.fit(model, _row(), data, out=tmp_path / "run", **QUICK)
    assert not (tmp_path / "run").exists()


class _Blind(nn.Sequential):
    """No gradient leads back to its images."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = 1.0 * x
        return super().forward(x.detach())  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (_Blind(nn.Flatten(), nn.Linear(64, 10)), {}, "gradient"),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Threshold(1e9, float("nan"))), {}, "logits are not finite"),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 9)), {}, "the model has 9 outputs, digits has 10 classes"),
        (_linear(), {"loggers": ["tensorbord"]}, "unknown logger 'tensorbord'; did you mean 'tensorboard'"),
    ],
)
def test_what_could_only_fail_later_leaves_no_folder(
    model: nn.Module, options: dict[str, Any], message: str, data: dale.Dataset, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        dale.fit(model, _row(), data, out=tmp_path / "run", device="cpu", **QUICK, **options)
    assert not (tmp_path / "run").exists()


def test_chains_in_train_mode_may_need_more_than_one_image(data: dale.Dataset, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    row = _row()
    row = replace(row, sampler=replace(row.sampler, mode="train"))  # type: ignore[type-var]
    dale.fit(model, row, data, out=tmp_path / "run", device="cpu", **(QUICK | {"epochs": 1}))


def test_a_run_goes_on_wherever_its_data_lie_and_whatever_it_started_from(
    data: dale.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data are looked at by themselves, and the weights are those of the checkpoint."""
    np.savez(tmp_path / "mine.npz", images=data.train.convert(data.train.images).numpy(), labels=data.train.labels)
    monkeypatch.chdir(tmp_path)
    mine = dale.load_dataset("mine.npz")
    weights = tmp_path / "start.safetensors"
    dale.models.save_weights(dale.create_model("convnet", mine, seed=3), weights)
    run = dale.fit(dale.create_model("convnet", mine, init=weights), _row(), mine, out=tmp_path / "a/run", **QUICK)
    elsewhere = dale.load_dataset(tmp_path / "mine.npz")
    dale.fit(dale.create_model("convnet", mine), _row(), elsewhere, out=run.path, resume=True, **QUICK)
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "b")  # from where "mine.npz" is nothing
    assert torch.equal(dale.load_run(run.path).data().train.index, mine.train.index)
    with pytest.raises(DataError, match=r"mine.npz: no such file"):
        run.config.data.load()


def test_free_folders_are_numbered(data: dale.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number in (1, 2):
        run = dale.fit(_linear(), dale.algorithms.erm(), data, **(QUICK | {"epochs": 1}))
        assert str(run.path) == f"runs/digits-erm-00{number}"


def test_in_a_thread_there_are_no_signals_to_catch(data: dale.Dataset, tmp_path: Path) -> None:
    done: list[dale.Run] = []
    work = threading.Thread(target=lambda: done.append(dale.fit(_linear(), _row(), data, out=tmp_path / "r", **QUICK)))
    work.start()
    work.join()
    assert len(done) == 1


def test_a_single_batch_larger_than_the_data(data: dale.Dataset, tmp_path: Path) -> None:
    run = dale.fit(_linear(), _row(), data, out=tmp_path / "run", **(QUICK | {"batch_size": 1000}))
    assert [r["step"] for r in run.metrics()] == [1, 2]


def test_validation_every_n_epochs_and_always_the_last(data: dale.Dataset, tmp_path: Path) -> None:
    options = QUICK | {"epochs": 5, "validation": Validation(every=2, steps=1, examples=5)}
    run = dale.fit(_linear(), _row(), data, out=tmp_path / "run", **options)
    assert [r["epoch"] for r in run.metrics() if "validation" in r] == [2, 4, 5]


def test_tightening_moves_the_limit_that_is_trained_at(data: dale.Dataset, tmp_path: Path) -> None:
    options = QUICK | {"epochs": 3, "schedule": Constant(), "optimiser": SGD(learning_rate=0.05)}
    run = dale.fit(_linear(), _row(), data, out=tmp_path / "run", **options)
    records = run.metrics()
    assert records[0]["constraints"][0]["margin"] == [0.0]
    for before, after in pairwise(records):
        (held,) = before["validation"]["constraints"]
        gap = min(max(0.0, held["measure"][0] - held["train"][0]), 0.25)
        assert after["constraints"][0]["margin"][0] == pytest.approx(gap, abs=1e-6)
    assert records[-1]["constraints"][0]["margin"][0] > 0.0


def test_epoch_ascent_by_hand(data: dale.Dataset, tmp_path: Path) -> None:
    row = _row(dual_frequency="epoch", dual_step_size=0.7, dual_initial=0.2, tighten=False)
    run = dale.fit(_linear(), row, data, out=tmp_path / "run", **QUICK)
    multiplier = 0.2
    for record in run.metrics():
        (constraint,) = record["constraints"]
        multiplier = max(0.0, multiplier + 0.7 * (constraint["measure"][0] - 0.5))
        assert constraint["multiplier"][0] == pytest.approx(multiplier, rel=1e-5)


def test_a_model_with_tied_weights_and_buffers_resumes(data: dale.Dataset, tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(64, 64)
            self.b = self.a
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
            self.head = nn.Linear(64, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.seen += 1
            return self.head(self.b(self.a(x.flatten(1)).relu()).relu())

    Tied.__qualname__ = "Tied"  # a run names its model by import path
    torch.manual_seed(0)
    first = Tied()
    second = copy.deepcopy(first)
    whole = dale.fit(first, _row(), data, out=tmp_path / "whole", **QUICK)
    dale.fit(second, _row(), data, out=tmp_path / "part", **QUICK)
    newest = RunFolder(tmp_path / "part").newest
    assert newest is not None
    newest.unlink()  # back to the end of the first epoch
    third = Tied()
    part = dale.fit(third, _row(), data, out=tmp_path / "part", resume=True, **QUICK)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(part.model.state_dict()[name], value), name


def test_averaging_is_recorded_and_optional(data: dale.Dataset, tmp_path: Path) -> None:
    run = dale.fit(_linear(), _row(), data, out=tmp_path / "run", averaging=Averaging(decay=0.5), **QUICK)
    assert run.config.training.averaging == Averaging(decay=0.5)
    assert run.folder.config(trust=True) == run.config


def test_validation_attacks_in_the_precision_of_training_and_judges_in_float32(tmp_path):
    data = dale.load_dataset("digits", train_size=64, validation_size=40)
    model = dale.create_model("convnet", data)
    seen: set[tuple[bool, torch.dtype]] = set()

    def note(module: torch.nn.Module, images: object, logits: torch.Tensor) -> None:
        if not module.training:
            seen.add((torch.is_grad_enabled(), logits.dtype))

    hook = model.register_forward_hook(note)
    objective = dale.algorithms.erm()  # no sampler of its own in training, which would be seen too
    objective = dataclasses.replace(objective, perturbations=dale.Linf(epsilon=0.1))
    dale.fit(
        model,
        objective,
        data,
        out=tmp_path / "run",
        progress=False,
        epochs=1,
        precision="bfloat16",
        averaging=None,
        validation=Validation(steps=2),
    )
    hook.remove()
    assert (True, torch.bfloat16) in seen  # the attack climbs
    assert (False, torch.float32) in seen  # the judge looks
    assert (False, torch.bfloat16) not in seen
