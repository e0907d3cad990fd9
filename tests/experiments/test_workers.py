"""A local sweep: real runs in processes of their own."""

from __future__ import annotations

import csv
import json
import os
import sys
from pathlib import Path

import pytest

from dale.cli.sweep import train_options
from dale.errors import DaleError
from dale.experiments import Launch, claim, expand, run_once
from dale.experiments.workers import failure, gpu_names

KINDS = train_options()
TINY = {
    "device": "cpu",
    "epochs": 1,
    "batch_size": 32,
    "steps": 1,
    "train_size": 64,
    "validation_size": 20,
    "certification_size": 20,
    "test_size": 20,
    "validation_steps": 1,
    "validation_examples": 5,
    "attacks": ["fgsm"],
    "examples": 10,
    "no_report": True,
}


@pytest.fixture
def dale(tmp_path, monkeypatch, capfd):
    from dale.cli import main

    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main([str(word) for word in words])
        return code, *capfd.readouterr()

    return run


def test_a_sweep_finishes_lists_what_failed_and_skips_what_is_done(dale, tmp_path):
    """One run trains, is evaluated and appears in the table; one has no data; what is done is not done again."""
    plain = {"base": TINY | {"algorithm": "pgd"}, "grid": {"dataset": ["digits", "gone.npz"]}}
    (tmp_path / "s.yaml").write_text(json.dumps(plain))
    code, out, err = dale("sweep", "s.yaml", "--workers", 2)
    assert code == 1
    assert "dataset=digits finished" in err
    assert "dataset=gone.npz failed: dale: error: gone.npz: no such file" in err
    assert "1 of 2 runs failed; the same command tries them again" in err
    assert "finished" in out
    with (tmp_path / "sweeps" / "s" / "results.csv").open() as file:
        rows = {row["dataset"]: row for row in csv.DictReader(file)}
    assert rows["digits"]["state"] == "finished"
    assert 0.0 <= float(rows["digits"]["fgsm"]) <= float(rows["digits"]["clean"]) <= 1.0
    assert rows["gone.npz"]["state"] == "failed"
    assert "no such file" in rows["gone.npz"]["error"]
    before = (tmp_path / "sweeps/s/dataset=digits/summary.json").stat().st_mtime_ns
    code, _, err = dale("sweep", "s.yaml", "--workers", 2, "--only", 0)
    assert code == 0
    assert "1 of 1 runs are finished already" in err
    assert (tmp_path / "sweeps/s/dataset=digits/summary.json").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("plain", "line"),
    [
        (
            {"grid": {"algorithm": ["dale", "dael"]}},
            "run algorithm=dael: unknown algorithm 'dael'; did you mean 'dale'?",
        ),
        ({"grid": {"algorithm": ["pgd"], "rho": [0.1]}}, "run algorithm=pgd,rho=0.1: unknown option"),
        ({"grid": {"epochs": ["many"]}}, "run epochs=many: argument --epochs: invalid int value: 'many'"),
        ({"grid": {"attacks": [["pgdd"]]}}, "unknown attack"),
        ({"base": {"model": "os:system"}}, "names code to import"),
    ],
)
def test_what_a_run_would_refuse_is_refused_before_any_run_starts(plain, line, dale, tmp_path):
    (tmp_path / "s.yaml").write_text(json.dumps(plain))
    code, _, err = dale("sweep", "s.yaml")
    assert code == 2
    assert line in err
    assert len(err.splitlines()) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s.yaml"]


def test_numbers_out_of_range(dale, tmp_path):
    (tmp_path / "s.yaml").write_text("grid: {seed: [0, 1]}")
    for words, line in (
        (("--workers", 0), "--workers: expected at least 1"),
        (("--only", 2), "runs 0 .. 1, got 2"),
        (("--cpus", "nan"), "--cpus: expected a number of at least 0, got nan"),
        (("--gpus", -1), "--gpus: expected a number of at least 0, got -1"),
        (("--slurm", "f", "--cpus", "inf"), "--cpus: expected a whole number of at least 1, got inf"),
        (("--slurm", "f", "--gpus", 0.5), "--gpus: expected a whole number of at least 0, got 0.5"),
        (("--slurm", "f", "--ray", "auto"), "give one of them"),
    ):
        code, _, err = dale("sweep", "s.yaml", *words)
        assert code == 2
        assert line in err


def test_commands_begin_or_continue(tmp_path):
    place = claim(tmp_path, expand({"base": {"examples": 5}, "grid": {"rho": [0.1]}}, KINDS))[0]
    launch = Launch(KINDS, trust=True, threads=3)
    assert launch.command(place)[4:] == [
        "train",
        "--quiet",
        "--trust",
        f"--out={place.folder}",
        "--examples=5",
        "--rho=0.1",
    ]
    place.folder.mkdir()
    (place.folder / "config.yaml").write_text("format: 1\n")
    assert launch.command(place)[4:] == ["train", "--quiet", "--trust", f"--resume={place.folder}", "--examples=5"]


def test_the_environment_of_a_run(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = Launch(KINDS, threads=3).environment()
    assert "RANK" not in found
    assert found["OMP_NUM_THREADS"] == "3"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert Launch(KINDS, threads=3).environment()["OMP_NUM_THREADS"] == "7"


def test_gpus_as_the_environment_has_them(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert gpu_names() == ["2", "5"]
    for none in ("", "-1", "-1,0"):  # what comes after a number that is none is not there either
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", none)
        assert gpu_names() == []


def test_a_process_that_cannot_start_and_one_that_failed(tmp_path):
    place = claim(tmp_path, expand({"grid": {"rho": [0.1]}}, KINDS))[0]
    with pytest.raises(DaleError, match="cannot start a run"):
        run_once(Launch(KINDS, python=str(tmp_path / "no-python")), place)
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\nimport sys; print('dale: error: a reason', file=sys.stderr); sys.exit(1)\n")
    os.chmod(script, 0o755)
    assert run_once(Launch(KINDS, python=str(script)), place) == "dale: error: a reason"
    assert failure(place, -9) == "killed by SIGKILL; run the sweep again to continue it"
    assert not place.finished


def test_a_finished_run_is_left_alone(tmp_path):
    place = claim(tmp_path, expand({"grid": {"rho": [0.1]}}, KINDS))[0]
    place.folder.mkdir()
    (place.folder / "summary.json").write_text("{}")
    place.mark_finished(1.0)
    assert run_once(Launch(KINDS, python=str(Path("/nowhere"))), place) is None
