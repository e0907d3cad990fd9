"""Several processes do what one does: the same losses, multipliers, weights and counts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

import shared_work
from dale.errors import UsageError
from dale.training import distributed
from dale.training.config import Training
from dale.training.steps import merged
from processes import free_port, start


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float) -> bool:
    return all(torch.allclose(a[k].double(), b[k].double(), rtol=tolerance, atol=tolerance) for k in a)


def test_two_processes_are_one_over_fifty_steps(tmp_path):
    """The same losses to the rounding of float32 sums, a batch of 31 as 15 and 16; multipliers of ten classes.

    The network is of float64: in float32 a gradient near zero takes another sign on some processors, and a step of its
    own from there.
    """
    alone = shared_work.steps(50, double=True)
    both = start(tmp_path, 2, "shared_work", "steps", count=50, double=True).results()
    assert both[0]["shares"] == [15] * 50
    assert both[1]["shares"] == [16] * 50
    torch.testing.assert_close(torch.tensor(both[0]["losses"]), torch.tensor(alone["losses"]), rtol=1e-6, atol=1e-6)
    assert close(both[0]["weights"], alone["weights"], 1e-6)
    assert close(both[0]["average"], alone["average"], 1e-6)
    torch.testing.assert_close(torch.tensor(both[0]["multipliers"]), torch.tensor(alone["multipliers"]))
    # between the processes nothing may differ at all
    assert both[0]["multipliers"] == both[1]["multipliers"]
    assert both[0]["losses"] == both[1]["losses"]
    for name, weight in both[0]["weights"].items():
        assert torch.equal(weight, both[1]["weights"][name]), name


def test_two_processes_with_synchronised_batchnorm_are_one_over_fifty_steps(tmp_path):
    alone = shared_work.steps(50, norm=True, double=True)
    both = start(tmp_path, 2, "shared_work", "steps", count=50, norm=True, sync=True, double=True).results()
    torch.testing.assert_close(torch.tensor(both[0]["losses"]), torch.tensor(alone["losses"]), rtol=1e-6, atol=1e-6)
    assert close(both[0]["weights"], alone["weights"], 1e-6)  # running statistics among them
    for name, weight in both[0]["weights"].items():
        assert torch.equal(weight, both[1]["weights"][name]), name


def test_local_batchnorm_differs_but_the_state_stays_the_same_everywhere(tmp_path):
    alone = shared_work.steps(6, norm=True)
    both = start(tmp_path, 2, "shared_work", "steps", count=6, norm=True).results()
    assert abs(both[0]["losses"][-1] - alone["losses"][-1]) > 1e-4  # each normalises by its own half of the batch
    for name, weight in both[0]["weights"].items():
        assert torch.equal(weight, both[1]["weights"][name]), name
    running = both[0]["weights"]["body.1.running_mean"]
    torch.testing.assert_close(running, alone["weights"]["body.1.running_mean"], rtol=0.2, atol=0.02)


@pytest.mark.parametrize("frequency", ["step", "epoch"])
def test_three_processes_and_accumulation_and_dual_ascent_per_epoch(tmp_path, frequency):
    alone = shared_work.steps(4, frequency=frequency)
    three = start(tmp_path, 3, "shared_work", "steps", count=4, accumulate=4, frequency=frequency).results()
    assert [r["shares"][0] for r in three] == [10, 10, 11]
    assert close(three[0]["weights"], alone["weights"], 1e-5)
    torch.testing.assert_close(torch.tensor(three[0]["ascended"]), torch.tensor(alone["ascended"]))
    assert three[0]["ascended"] == three[1]["ascended"] == three[2]["ascended"]


def test_accumulation_gives_the_gradient_of_the_whole_batch():
    """Five parts of a batch of 31, none of them equal in size to all others, and one ascent of the multipliers."""
    whole, parts = shared_work.steps(1), shared_work.steps(1, accumulate=5)
    for a, b in zip(whole["gradients"], parts["gradients"], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(torch.tensor(whole["multipliers"]), torch.tensor(parts["multipliers"]))
    assert whole["losses"][0] == pytest.approx(parts["losses"][0], rel=1e-6)


def test_more_parts_than_examples_are_refused():
    with pytest.raises(UsageError, match="accumulate must lie between 1 and the batch size 8, got 9"):
        Training(batch_size=8, accumulate=9)
    assert merged([step := object()]) is step  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"batch_size": 8, "accumulate": 5},
            "accumulate must lie between 1 and 4, the part of a batch of 8 that each of 2 processes has",
        ),
        ({"batch_size": 1}, "batch_size 1 is no example for each of 2 processes: raise it"),
    ],
)
def test_too_little_for_each_process_is_refused_before_a_folder_is_made(options, line, tmp_path):
    for said in start(tmp_path, 2, "shared_work", "too_small", out="run", **options).results():
        assert line in said
    assert not (tmp_path / "run").exists()


LATE = "import dale.training.loop as l, os, time; f = l.Trainer.run; l.Trainer.run = "
LATE += "lambda self: (time.sleep(0.5 * int(os.environ['RANK'])), f(self))[1]"


def test_a_process_that_is_late_sends_the_same_messages(tmp_path):
    """The first one has written its start by then: what a process does may not depend on the disk."""
    assert len(start(tmp_path, 2, "shared_work", "trained", out="run", before=LATE).results()) == 2


def test_processes_without_a_common_disk_resume(tmp_path):
    """Only the first one needs the run folder."""
    apart = "import os; os.makedirs(os.environ['RANK'], exist_ok=True); os.chdir(os.environ['RANK'])"
    whole = shared_work.trained(str(tmp_path / "whole"))
    stop = apart + (
        "; import dale.training.loop as l, signal; f = l.Trainer._log; "
        "l.Trainer._log = lambda self, r: (f(self, r), self.state.epoch == 2 and os.kill(os.getpid(), signal.SIGTERM))"
    )
    group = start(tmp_path, 2, "shared_work", "trained", out="run", before=stop)
    assert group.wait() == [1, 1]
    resumed = start(tmp_path, 2, "shared_work", "trained", out="run", resume=True, before=apart)
    assert resumed.wait() == [0, 0]
    folders = [tmp_path / str(rank) / "run" for rank in (0, 1)]
    assert [(folder / "summary.json").exists() for folder in folders] == [True, False]
    assert close(load_file(folders[0] / "model.safetensors"), whole["weights"], 1e-4)


@pytest.mark.parametrize("count", [1, 37])
def test_validation_is_shared_with_exact_counts(tmp_path, count):
    """37 examples are 18 and 19, in batches of 16; of one example one process has none."""
    alone = shared_work.held_out(count)
    both = start(tmp_path, 2, "shared_work", "held_out", count=count).results()
    for found in both:
        torch.testing.assert_close(found["logits"], alone["logits"], rtol=1e-5, atol=1e-6)
        assert torch.equal(found["labels"], alone["labels"])
        assert found["seen"].clean == alone["seen"].clean
        assert found["seen"].robust == alone["seen"].robust
        for mine, theirs in zip(found["seen"].measures, alone["seen"].measures, strict=True):
            assert torch.equal(mine.members, theirs.members)


def test_an_evaluation_is_shared_with_the_outcome_of_every_example(tmp_path):
    """83 examples in chunks of 16, the last of them uneven, over two processes; then over three."""
    alone = shared_work.attacked(83)
    assert 0 < alone["worst"] < alone["n"]
    for size in (2, 3):
        for found in start(tmp_path / str(size), size, "shared_work", "attacked", count=83).results():
            assert found == alone


def test_a_checkpoint_of_two_processes_resumes_on_one_and_on_three(tmp_path):
    """Stopped in the middle of an epoch by a signal to one process; the last weights are those of the whole run."""
    whole = shared_work.trained(str(tmp_path / "whole"))
    sleepy = (
        "import dale.training.steps as s, time; f = s.add_totals; s.add_totals = lambda *a: (time.sleep(0.05), f(*a))"
    )
    results = []
    for size in (0, 3):
        folder = tmp_path / str(size)
        group = start(folder, 2, "shared_work", "trained", out="run", before=sleepy)
        group.wait_until(lambda folder=folder: any(folder.glob("run/checkpoints/step-*.safetensors")))
        os.kill(group.members[1].pid, signal.SIGTERM)
        assert group.wait() == [1, 1]  # the exception ends the process; the command line gives it a code of its own
        assert "nothing is lost" in group.err(0)
        assert "nothing is lost" in group.err(1)
        assert not (folder / "run" / "summary.json").exists()
        resumed = start(folder, size, "shared_work", "trained", out="run", resume=True).results()
        assert all(close(r["weights"], whole["weights"], 1e-4) for r in resumed)
        results.append(resumed[0]["summary"])
    for summary in results:
        assert summary["selected_epoch"] == whole["summary"]["selected_epoch"]
        assert summary["multipliers"][0] == pytest.approx(whole["summary"]["multipliers"][0], rel=1e-3)


def test_messages(tmp_path):
    for found in start(tmp_path, 3, "shared_work", "messages").results():
        assert found["total"] == [6.0, [[30.0], [30.0]]]
        assert found["added"] == [3 * 2**40 + 3]
        assert found["agreed"] == 15
        assert found["late"] == [0, 7, 0, 2, 0]  # each the answer to the question before
        assert found["gathered"] == [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
        assert found["told"] == "naïve"
        assert found["silence"] == ""


ENDING = """
import os, sys
from dale.training import distributed
# Python's lock is not given up, and gloo's threads share a core with the main one: it wakes up and ends before they do
os.sched_setaffinity(0, {int(os.environ["RANK"]) % os.cpu_count()})
sys.setswitchinterval(1000.0)
with distributed.connected("cpu"):
    for _ in range(50):
        distributed.told("hello")
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="a process cannot be kept on one core here")
def test_a_process_ends_in_peace_right_after_its_last_message():
    """Interpreters that end for real: none is aborted because a thread of gloo's still held the last message."""
    around = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    members = [
        subprocess.Popen([sys.executable, "-c", ENDING], env=around | {"RANK": rank}, stderr=subprocess.PIPE, text=True)
        for rank in "01"
    ]
    assert [member.communicate(timeout=120)[1] for member in members] == ["", ""]
    assert [member.returncode for member in members] == [0, 0]


def test_an_error_of_the_first_process_is_everybodys(tmp_path):
    for found in start(tmp_path, 2, "shared_work", "refused", message="no --out").results():
        assert found == ["UsageError", "no --out"]


def test_alone_nothing_is_sent(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    assert not distributed.launched()
    with distributed.connected("cpu") as place:
        assert not distributed.active()
        assert place == torch.device("cpu")
        tensor = torch.ones(2)
        assert distributed.total(tensor)[0] is tensor
        assert distributed.gathered(tensor) is tensor
        assert distributed.agreed(3) == 3
        assert distributed.Agreement()(3) == 3
        assert distributed.told("here") == "here"


def test_a_device_by_number_is_refused_under_torchrun(monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="each process takes a GPU of its own; give cuda or cpu"):
        distributed.local_device("cuda:1")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NCCL needs a GPU")
def test_nccl_with_one_process(tmp_path):
    """One process on a GPU, through DistributedDataParallel and NCCL, trains what the plain step trains."""
    found = start(tmp_path, 1, "shared_work", "steps", count=10, device="cuda").results()[0]
    alone = shared_work.steps(10, device="cuda")
    torch.testing.assert_close(torch.tensor(found["losses"]), torch.tensor(alone["losses"]), rtol=1e-4, atol=1e-5)


def by_torchrun(folder, device: str, *arguments: str) -> None:
    """One process of torchrun's trains; SIGKILL after its first checkpoint, and torchrun starts it again."""
    (folder / "sitecustomize.py").write_text(
        "import os, signal, threading, time, pathlib\n"
        "if os.environ.get('TORCHELASTIC_RESTART_COUNT') == '0':\n"
        "    def die():\n"
        "        while not list(pathlib.Path('shared').glob('checkpoints/step-*')): time.sleep(0.001)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    threading.Thread(target=die, daemon=True).start()\n"
    )
    tiny = [*("--device", device, "--epochs", "6", "--batch-size", "64", "--steps", "2", "--train-size", "256")]
    tiny += [*("--validation-size", "40", "--certification-size", "40", "--no-evaluate", "--quiet", "--fast", "off")]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "1", "--max-restarts", "1"]
    for begin, name in (([], "alone"), (torchrun, "shared")):
        words = [sys.executable, *begin, "-m", "dale", "train", *tiny, *arguments, "--out", name]
        path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])  # it may run from source
        variables = os.environ | ({"PYTHONPATH": path} if begin else {})
        done = subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    assert "failed (exitcode: -9) local_rank: 0" in done.stderr
    alone, shared = (
        [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("alone", "shared")
    )
    assert len(alone) == len(shared) == 6
    for mine, theirs in zip(shared, alone, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=2e-2)
        assert mine["clean_accuracy"] == pytest.approx(theirs["clean_accuracy"], abs=0.05)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NCCL needs a GPU")
def test_nccl_under_torchrun_with_one_process(tmp_path):
    """`torchrun --nproc-per-node 1 -m dale train --device cuda`, its restart included, trains as one process does."""
    by_torchrun(tmp_path, "cuda")


@pytest.mark.verify
def test_gloo_under_torchrun_with_one_process(tmp_path):
    """The same on a CPU, so that the test above is not first run where there is a GPU."""
    by_torchrun(tmp_path, "cpu")
