"""Snapshots and the thread that writes them."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import dale
from dale.errors import DaleError
from dale.training.averaging import AveragedModel, Averaging
from dale.training.checkpoints import Snapshot, Writer
from dale.training.runs import RunFolder
from dale.training.selection import Candidate
from dale.training.state import TrainState


def make_state(average: bool = True) -> TrainState:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)).to(memory_format=torch.channels_last)
    optimiser = torch.optim.AdamW(model.parameters())
    model(torch.rand(4, 2, 5, 5)).square().sum().backward()
    optimiser.step()
    duals = dale.algorithms.dale(dale.Linf(epsilon=0.1), rho=0.5).initial_duals(10)
    held = AveragedModel(model, Averaging()) if average else None
    return TrainState(model, optimiser, duals, held, epoch=1)


def chosen(state: TrainState, score: float) -> None:
    state.selection.add(Candidate(state.epoch, score, -1.0))


def test_a_snapshot_is_of_its_moment(tmp_path: Path) -> None:
    """Every tensor of the state and its history change afterwards; what is written does not."""
    state = make_state()
    state.history.append({"epoch": 1})
    before = {name: tensor.clone() for name, tensor in state.tensors().items()}
    taken = Snapshot.of(state, 7)
    for tensor in state.tensors().values():
        tensor.detach().add_(1)
    state.history.append({"epoch": 2})
    state.epoch = 2
    folder = RunFolder(tmp_path)
    folder.write_checkpoint(taken)
    fresh = make_state()
    assert folder.newest is not None
    assert folder.newest.name == "step-000000007.safetensors"
    folder.restore(fresh)
    assert fresh.epoch == 1
    assert fresh.history == [{"epoch": 1}]
    assert set(fresh.tensors()) == set(before)
    for name, tensor in fresh.tensors().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("average", [False, True])
def test_a_candidate_is_the_model_that_would_be_shipped(average: bool, tmp_path: Path) -> None:
    state = make_state(average)
    if state.average is not None:
        state.average.module[0].weight.data.mul_(0.5)
    chosen(state, 0.5)
    folder = RunFolder(tmp_path)
    folder.write_checkpoint(Snapshot.of(state, 7, candidate=True), {"who": "me"})
    found = load_file(folder.candidate(1))
    expected = state.shipped.state_dict()
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_a_candidate_that_is_out_already_is_not_written(tmp_path: Path) -> None:
    state = make_state()
    chosen(state, 0.5)
    state.epoch = 2
    chosen(state, 0.4)
    assert Snapshot.of(state, 7, candidate=True).candidates == {}
    assert Snapshot.of(state, 7, candidate=True).needed == {1}


class Slow:
    """A disk that writes when it is told to."""

    def __init__(self) -> None:
        self.go = threading.Semaphore(0)
        self.written: list[Snapshot] = []
        self.fail = False

    def __call__(self, snapshot: Snapshot) -> None:
        assert self.go.acquire(timeout=20)
        if self.fail:
            raise DaleError("no room")
        self.written.append(snapshot)


def test_training_does_not_wait_and_the_newest_takes_the_place_of_one_that_waits() -> None:
    """Of five, the first is being written, the last is written next; a candidate of one between is not lost."""
    state, disk = make_state(), Slow()
    writer = Writer(disk)
    for epoch in range(1, 6):
        state.epoch = epoch
        chosen(state, {1: 0.1, 2: 0.2, 3: 0.9}.get(epoch, 0.3))  # from the third on, it is the best
        writer.put(Snapshot.of(state, 7, candidate=True))
        if epoch == 1:
            _until(lambda: writer._waiting is None)
    assert disk.written == []
    disk.go.release(10)
    writer.wait()
    assert [snapshot.epoch for snapshot in disk.written] == [1, 5]
    last = disk.written[-1]
    assert last.needed == {3}
    assert set(last.candidates) == {3}
    writer.wait()  # and again, for nothing


def _until(condition) -> None:
    limit = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.001)


def test_what_goes_wrong_is_raised_at_the_next_checkpoint_or_at_the_end() -> None:
    state, disk = make_state(), Slow()
    disk.fail = True
    writer = Writer(disk)
    writer.put(Snapshot.of(state, 7))
    _until(lambda: writer._waiting is None)
    writer.put(Snapshot.of(state, 7))
    disk.go.release(10)
    writer.close()
    with pytest.raises(DaleError, match="no room"):
        writer.put(Snapshot.of(state, 7))
    writer.close()
    assert disk.written == []  # the second was dropped: after an error nothing is written behind training's back
    writer = Writer(disk)
    writer.put(Snapshot.of(state, 7))
    with pytest.raises(DaleError, match="no room"):
        writer.wait()
    writer.wait()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a device of its own needs a GPU")
def test_a_snapshot_on_a_gpu_is_of_its_moment(tmp_path: Path) -> None:
    """Work queued before the copy is in it, work queued after it is not, whatever is still running."""
    state = make_state(average=False)
    state.model.cuda()
    weight = state.model[0].weight
    busy = torch.rand(4096, 4096, device="cuda")
    with torch.no_grad():
        for _ in range(50):
            busy = busy @ busy * 1e-4
        weight.fill_(3.0)
        taken = Snapshot.of(state, 7)
        weight.fill_(4.0)
    folder = RunFolder(tmp_path)
    writer = Writer(folder.write_checkpoint)
    writer.put(taken)
    for _ in range(50):
        busy = busy @ busy * 1e-4
    writer.wait()
    assert folder.newest is not None
    assert bool((load_file(folder.newest)["model/0.weight"] == 3.0).all())
