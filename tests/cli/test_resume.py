"""Killed at any moment and resumed, a run ends with the bits of one that was never stopped."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from torch import Tensor

from dale.files import read_tensors

from .conftest import NET, TINY, Launch, Result


def _without_time(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != "seconds"}


def _bits(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name: (t.dtype, tuple(t.shape), t.numpy().tobytes()) for name, t in tensors.items()}


def _content(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The tensors of a weights file to the bit, and what stands beside them (in an order of the library's choosing)."""
    with safe_open(path, framework="pt") as file:
        return _bits({name: file.get_tensor(name) for name in file.keys()}), file.metadata()  # noqa: SIM118


def ending(run: Path) -> dict[str, Any]:
    """All that a run ends with, timings aside."""
    newest = max((run / "checkpoints").glob("step-*.safetensors"))
    tensors, facts = read_tensors(newest)
    lines = [_without_time(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [_without_time(r) for r in facts.pop("history")] == lines
    return {
        "model": _content(run / "model.safetensors"),
        "last": _content(run / "last.safetensors"),
        "metrics": lines,
        "multipliers": [[c["multiplier"] for c in line["constraints"]] for line in lines],
        "summary": _without_time(json.loads((run / "summary.json").read_text())),
        "newest": newest.name,
        "facts": facts,
        "state": _bits(tensors),
    }


def assert_same_ending(run: Path, other: Path) -> None:
    mine, theirs = ending(run), ending(other)
    for key in mine:
        assert mine[key] == theirs[key], key
    left = [p.name for p in run.rglob(".*") if p.name != ".lock"]
    assert left == []  # nothing half written stays


# every kind of state: two optimisers, both frequencies of ascent, BatchNorm and dropout, an average or none
KINDS = {
    "adamw": ["--optimiser", "adamw"],
    "sgd-batchnorm-dropout-epoch": [
        *("--optimiser", "sgd", "--lr", "0.05", "--model", "net:Net", "--dual-frequency", "epoch", "--by", "class")
    ],
    "adadelta-no-average": ["--optimiser", "adadelta", "--ema", "0", "--min-accuracy", "0.9"],
}


def _prepare(folder: Path) -> Path:
    folder.mkdir()
    (folder / "net.py").write_text(NET)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Launch], Path]:
    """The uninterrupted run of a kind, made once."""
    made: dict[str, Path] = {}

    def get(kind: str, launch: Launch) -> Path:
        if kind not in made:
            folder = _prepare(tmp_path_factory.mktemp("whole") / kind)
            result = launch(folder, "train", *TINY, *KINDS[kind], "--out", "run").wait()
            assert result.code == 0, result.err
            made[kind] = folder / "run"
        return made[kind]

    return get


Whole = Callable[[str, Launch], Path]


def _resume(launch: Launch, folder: Path, **more: str) -> Result:
    result = launch(folder, "train", "--resume", "run", "--trust", "--no-evaluate", **more).wait()
    assert result.code == 0, result.err
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_random_moments(kind: str, whole: Whole, launch: Launch, tmp_path: Path) -> None:
    reference = whole(kind, launch)
    folder = _prepare(tmp_path / "killed")
    seconds = sum(
        json.loads(line)["seconds"]["total"] for line in (reference / "metrics.jsonl").read_text().splitlines()
    )
    moments = random.Random(time.time_ns())
    arguments: list[object] = ["train", *TINY, *KINDS[kind], "--out", "run"]
    for _ in range(2):
        child = launch(folder, *arguments)
        child.wait_until((folder / "run" / "config.yaml").exists)
        time.sleep(moments.uniform(0.0, seconds))
        child.process.kill()
        child.process.join()
        arguments = ["train", "--resume", "run", "--trust", "--no-evaluate"]
    _resume(launch, folder)
    assert_same_ending(folder / "run", reference)


# a real SIGKILL at the n-th call of a system function: before it, so that what it would have done is not done
AT = """
import signal
calls = 0
def deadly(real):
    def call(*arguments, **options):
        global calls
        calls += 1
        if calls == {number}:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)
    return call
os.{function} = deadly(os.{function})
"""
# 3 epochs: config, environment, metrics; then candidate and checkpoint of each epoch; last, model, summary
MOMENTS = [
    pytest.param(function, number, marks=() if (function, number) in QUICK else pytest.mark.verify)
    for QUICK in ({("replace", 1), ("fsync", 5), ("replace", 6), ("unlink", 1), ("replace", 10)},)
    for function, last in (("fsync", 12), ("replace", 12), ("unlink", 2))
    for number in range(1, last + 1)
]


@pytest.mark.parametrize(("function", "number"), MOMENTS)
def test_killed_while_writing(function: str, number: int, whole: Whole, launch: Launch, tmp_path: Path) -> None:
    folder = _prepare(tmp_path / "killed")
    command = ["train", *TINY, *KINDS["adamw"], "--out", "run"]
    first = launch(folder, *command, before=AT.format(function=function, number=number)).wait()
    if first.code == 0:
        pytest.skip(f"fewer than {number} calls of {function}")
    assert first.code == -signal.SIGKILL
    if (folder / "run" / "config.yaml").exists():
        _resume(launch, folder)
    else:  # there is no run yet, and nothing of it stands in the way of a new one
        assert launch(folder, *command).wait().code == 0
    assert_same_ending(folder / "run", whole("adamw", launch))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_asked_to_stop_in_the_middle_of_an_epoch(
    number: signal.Signals, code: int, whole: Whole, launch: Launch, tmp_path: Path
) -> None:
    kind = "sgd-batchnorm-dropout-epoch"
    folder = _prepare(tmp_path / "stopped")
    # the signal arrives during step 5 of 9, the second of the second epoch
    before = f"""
import signal, dale.training.steps as steps
real, calls = steps.add_totals, 0
def add_totals(*arguments):
    global calls
    calls += 1
    if calls == 5:
        os.kill(os.getpid(), {int(number)})
    return real(*arguments)
steps.add_totals = add_totals
"""
    stopped = launch(folder, "train", *TINY, *KINDS[kind], "--out", "run", before=before).wait()
    assert stopped.code == code
    assert stopped.err.splitlines()[-1] == (
        "dale: error: stopped; nothing is lost. Continue with: dale train --resume run --trust"
    )
    assert "Traceback" not in stopped.err
    assert (folder / "run" / "checkpoints" / "step-000000005.safetensors").exists()
    assert not (folder / "run" / "model.safetensors").exists()
    _resume(launch, folder)
    assert_same_ending(folder / "run", whole(kind, launch))


def _damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    else:
        data[-100] ^= 1
        path.write_bytes(data)


def _copy(whole: Path, folder: Path) -> Path:
    """The run as a process left it that was killed after its second epoch."""
    import shutil

    shutil.copytree(whole, folder / "run")
    for name in ("model.safetensors", "last.safetensors", "summary.json"):
        (folder / "run" / name).unlink()
    return folder / "run"


@pytest.mark.parametrize("how", ["truncated", "flipped", "empty"])
def test_a_damaged_newest_checkpoint(
    how: str, whole: Whole, launch: Launch, tmp_path: Path, dale: Callable[..., Result]
) -> None:
    reference = whole("adamw", launch)
    run = _copy(reference, tmp_path)
    _damage(run / "checkpoints" / "step-000000009.safetensors", how)
    result = dale("train", "--resume", "run", "--no-evaluate")
    assert result.code == 0
    (line,) = [line for line in result.err.splitlines() if "damaged" in line]
    assert line.startswith("warning: ")
    assert "step-000000009.safetensors" in line
    assert line.endswith("falling back to the checkpoint before it")
    assert_same_ending(run, reference)


def test_no_readable_checkpoint_is_one_line_and_changes_nothing(
    whole: Whole, launch: Launch, tmp_path: Path, dale: Callable[..., Result]
) -> None:
    run = _copy(whole("adamw", launch), tmp_path)
    for path in (run / "checkpoints").glob("step-*"):
        _damage(path, "truncated")
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    result = dale("train", "--resume", "run", "--no-evaluate", "--quiet")
    assert result.code == 1
    assert len(result.err.splitlines()) == 1
    assert result.err.startswith("dale: error: no checkpoint of run can be read: ")
    assert "falling back" not in result.err
    assert result.err.count("damaged") == len(list((run / "checkpoints").glob("step-*"))) > 1
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


def test_a_checkpoint_of_another_model_is_one_line(
    whole: Whole, launch: Launch, tmp_path: Path, dale: Callable[..., Result]
) -> None:
    run = _copy(whole("adamw", launch), tmp_path)
    (tmp_path / "net.py").write_text(NET)
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("name: convnet", "name: net:Net"))
    result = dale("train", "--resume", "run", "--trust", "--no-evaluate", "--quiet")
    assert result.code == 1
    assert len(result.err.splitlines()) == 1
    assert "step-000000009.safetensors does not belong to this run's model" in result.err


def test_a_checkpoint_of_another_format_is_one_line(
    whole: Whole, launch: Launch, tmp_path: Path, dale: Callable[..., Result]
) -> None:
    from dale.files import write_tensors

    run = _copy(whole("adamw", launch), tmp_path)
    path = run / "checkpoints" / "step-000000009.safetensors"
    tensors, facts = read_tensors(path)
    write_tensors(path, tensors, facts | {"format": 99})
    result = dale("train", "--resume", "run", "--no-evaluate", "--quiet")
    assert (result.code, len(result.err.splitlines())) == (1, 1)
    assert "checkpoint format 99, this version reads 1" in result.err


def test_resuming_a_finished_run_does_no_harm(
    whole: Whole, launch: Launch, tmp_path: Path, dale: Callable[..., Result]
) -> None:
    import shutil

    reference = whole("adamw", launch)
    shutil.copytree(reference, tmp_path / "run")
    assert dale("train", "--resume", "run", "--no-evaluate", "--quiet").code == 0
    assert_same_ending(tmp_path / "run", reference)


def test_resuming_takes_no_other_options(
    whole: Whole, launch: Launch, tmp_path: Path, dale: Callable[..., Result]
) -> None:
    run = whole("adamw", launch)
    for option, value in (("--epochs", 9), ("--rho", 0.5), ("--seed", 0), ("--config", "x.yaml"), ("--out", "other")):
        result = dale("train", "--resume", run, option, value)
        assert (result.code, len(result.err.splitlines())) == (2, 1)
        assert f"{option} cannot be changed with it" in result.err
    assert dale("train", "--resume", tmp_path / "nowhere").code == 2


def test_the_initial_weights_are_not_needed_again(
    whole: Whole, launch: Launch, tmp_path: Path, dale: Callable[..., Result]
) -> None:
    (tmp_path / "weights.safetensors").write_bytes((whole("adamw", launch) / "last.safetensors").read_bytes())
    assert dale("train", *TINY, "--init", "weights.safetensors", "--out", "run", "--quiet").code == 0
    before = ending(tmp_path / "run")
    (tmp_path / "weights.safetensors").unlink()
    assert dale("train", "--resume", "run", "--no-evaluate", "--quiet").code == 0
    assert ending(tmp_path / "run") == before
    # they were used: training from them is another run
    assert before["last"] != ending(whole("adamw", launch))["last"]


def test_the_same_seed_gives_the_same_bits_and_another_does_not(
    whole: Whole, launch: Launch, tmp_path: Path, dale: Callable[..., Result]
) -> None:
    reference = ending(whole("adamw", launch))
    assert dale("train", *TINY, *KINDS["adamw"], "--out", "same", "--quiet").code == 0
    assert ending(tmp_path / "same") == reference  # also in another process, after other work
    assert dale("train", *TINY, *KINDS["adamw"], "--out", "other", "--seed", 1, "--quiet").code == 0
    assert ending(tmp_path / "other")["last"] != reference["last"]


@pytest.mark.verify
def test_killed_many_times_on_all_cores(tmp_path: Path) -> None:
    """Real processes with several threads each, a longer run, killed at random until it happens to end."""
    kind = "sgd-batchnorm-dropout-epoch"
    _prepare(tmp_path / "work")
    environment = os.environ | {"OMP_NUM_THREADS": str(min(4, os.cpu_count() or 1))}
    more = ["--epochs", "12", "--train-size", "256"]

    def start(*arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "dale", "train", *arguments]
        return subprocess.Popen(
            command, cwd=tmp_path / "work", env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )

    begun = time.monotonic()
    with start(*TINY, *KINDS[kind], *more, "--out", "whole") as process:
        assert process.wait(280) == 0, process.stderr
    seconds = time.monotonic() - begun
    arguments, moments, code = [*TINY, *KINDS[kind], *more, "--out", "run"], random.Random(time.time_ns()), -1
    for _ in range(3):
        with start(*arguments) as process:
            try:
                code = process.wait(moments.uniform(0.3, 1.0) * seconds)
            except subprocess.TimeoutExpired:
                process.kill()
        if code == 0:
            break
        if (tmp_path / "work" / "run" / "config.yaml").exists():
            arguments = ["--resume", "run", "--trust", "--no-evaluate"]
    else:
        with start(*arguments) as process:
            assert process.wait(280) == 0
    assert_same_ending(tmp_path / "work" / "run", tmp_path / "work" / "whole")
