"""Many runs: each once, those with a result skipped, the others as processes of the sweep machinery."""

from __future__ import annotations

import sys
from pathlib import Path

from dale.reproduction import Spec, specs_of
from dale.reproduction.runner import WorkerLaunch, outdated, slots_of


def test_tables_share_their_runs(tmp_path) -> None:
    specs = [
        spec for table in ("table1", "table6", "table7") for spec in specs_of(table, "cifar10", "resnet18", "short", 1)
    ]
    slots = slots_of(specs, tmp_path / "runs", tmp_path / "results")
    assert len(specs) == 10 + 11 + 16
    assert len(slots) == len({spec.path for spec in specs}) == 10 + (11 - 3) + (16 - 2)


def test_a_result_makes_a_run_finished_wherever_it_was_made(put, tmp_path) -> None:
    specs = specs_of("table1", "mnist", "convnet", "short", 1, ["pgd", "erm"])
    put(specs[0], (10, {"clean": 0.5}))
    erm, pgd = slots_of(specs, tmp_path / "runs", tmp_path / "results")
    assert (erm.run.name, erm.finished, pgd.finished) == ("mnist/convnet/erm-short-seed0", True, False)
    assert not pgd.begun
    assert pgd.folder == tmp_path / "runs" / "mnist" / "convnet" / "pgd-short-seed0"
    assert outdated([erm, pgd]) == []
    put(specs[0], (10, {"clean": 0.5}), config="another")
    assert outdated([erm, pgd]) == [erm]


def test_a_worker_is_this_command_for_one_run(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it once something was compiled
    slot = slots_of([Spec("mnist", "convnet", "pgd")], tmp_path, tmp_path)[0]
    launch = WorkerLaunch(common=["table1", "--budget=short"], cache=tmp_path / "compiled", threads=1)
    command = launch.command(slot)
    assert command[0] == sys.executable
    assert command[-4:] == ["reproduce", "table1", "--budget=short", "--only=mnist/convnet/pgd-short-seed0"]
    assert Path(launch.environment()["TORCHINDUCTOR_CACHE_DIR"]).name == "compiled"
