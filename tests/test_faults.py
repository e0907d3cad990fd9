"""What is promised after which fault, each with the real fault: signals, a full disk, flipped bytes, a mad clock."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from dale.files import read_tensors, write_tensors
from dale.training.runs import RunFolder
from processes import Group, free_port, start

TINY = [
    *("--device", "cpu", "--epochs", "4", "--batch-size", "32", "--steps", "2", "--ema", "0.9"),
    *("--train-size", "96", "--validation-size", "40", "--certification-size", "40"),
    *("--validation-steps", "1", "--validation-examples", "10", "--no-evaluate", "--quiet"),
]
SLOW = "import time, dale.training.steps as s; f = s.add_totals; s.add_totals = lambda *a: time.sleep(0.05) or f(*a)"


def train(folder: Path, size: int, *arguments: str, **options: object) -> Group:
    return start(folder, size, "processes", "command", arguments=["train", *arguments], **options)  # type: ignore[arg-type]


def checkpoints(run: Path) -> list[Path]:
    """Those of training; that of step 0 is the start."""
    return sorted(p for p in run.glob("checkpoints/step-*.safetensors") if p.stem != "step-000000000")


def same_weights(one: Path, other: Path, tolerance: float) -> bool:
    a, b = load_file(one / "last.safetensors"), load_file(other / "last.safetensors")
    return all(float((a[k].double() - b[k].double()).abs().max()) <= tolerance for k in a)


def one_line(text: str, *words: str) -> bool:
    lines = [line for line in text.splitlines() if line.startswith("dale: error:")]
    return len(lines) == 1 and all(word in lines[0] for word in words) and "Traceback" not in text


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nothing happens to, on one process and on two (dropout makes them differ)."""
    folder = tmp_path_factory.mktemp("whole")
    for size in (1, 2):
        assert train(folder / str(size), size, *TINY, "--out", "run").wait() == [0] * size
    return folder


def test_sigkill_of_one_process_of_two(whole, tmp_path):
    """The other ends by itself with one line; resumed on two processes, the run ends as if nothing had happened."""
    group = train(tmp_path, 2, *TINY, "--out", "run", before=SLOW)
    group.wait_until(lambda: bool(checkpoints(tmp_path / "run")))
    os.kill(group.members[1].pid, signal.SIGKILL)
    assert group.wait(60) == [1, -signal.SIGKILL]
    assert one_line(group.err(0), "process 0 lost contact with another one of this run", "--resume")
    assert train(tmp_path, 2, "--resume", "run", "--no-evaluate", "--quiet", "--device", "cpu").wait() == [0, 0]
    assert same_weights(tmp_path / "run", whole / "2" / "run", 1e-5)


def test_sigkill_of_the_writing_process(tmp_path):
    group = train(tmp_path, 2, *TINY, "--out", "run", before=SLOW)
    group.wait_until(lambda: bool(checkpoints(tmp_path / "run")))
    os.kill(group.members[0].pid, signal.SIGKILL)
    assert group.wait(60) == [-signal.SIGKILL, 1]
    assert one_line(group.err(1), "lost contact")


def test_sigkill_of_all_and_an_elastic_restart(whole, tmp_path):
    """The same command, as torchrun starts it again after a death, continues the run."""
    group = train(tmp_path, 2, *TINY, "--out", "run", before=SLOW, variables={"TORCHELASTIC_MAX_RESTARTS": "1"})
    group.wait_until(lambda: bool(checkpoints(tmp_path / "run")))
    for member in group.members:
        os.kill(member.pid, signal.SIGKILL)
    assert group.wait() == [-signal.SIGKILL] * 2
    again = {"TORCHELASTIC_MAX_RESTARTS": "1", "TORCHELASTIC_RESTART_COUNT": "1"}
    assert train(tmp_path, 2, *TINY, "--out", "run", variables=again).wait() == [0, 0]
    assert same_weights(tmp_path / "run", whole / "2" / "run", 1e-5)


DYING = """
import os, signal, threading, time, pathlib
if os.environ.get("RANK") == os.environ.get("VICTIM") and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
    def die():
        while not list(pathlib.Path("run").glob("checkpoints/step-*[1-9]*")): time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=die, daemon=True).start()
"""


def torchrun(folder: Path, *arguments: str, nodes: int = 1, **variables: str) -> tuple[list[int], list[str]]:
    """`torchrun ... dale train` on two processes, all of it: agents, their store, their restarts; codes and stderr."""
    (folder / "sitecustomize.py").write_text(DYING)
    around = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"} | variables
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(2 // nodes), "--max-restarts", "1"]
    if nodes > 1:
        words += ["--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    words += ["-m", "dale", "train", *arguments]
    agents, errors = [], []
    for number in range(nodes):
        errors.append(folder / f"agent-{number}")
        with errors[-1].open("w") as file:
            agents.append(subprocess.Popen(words, cwd=folder, env=around, stdout=subprocess.DEVNULL, stderr=file))
    try:
        codes = [agent.wait(240) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    return codes, [path.read_text() for path in errors]


@pytest.mark.verify
@pytest.mark.parametrize(("nodes", "victim"), [(1, "0"), (1, "1"), (2, "1")])
def test_torchrun_restarts_after_sigkill(nodes, victim, whole, tmp_path):
    """torchrun itself starts the processes again, once, and the run ends as if nothing had happened.

    With two agents, as on two machines, only that of the process killed counts a restart; the other follows.
    """
    codes, errors = torchrun(tmp_path, *TINY, "--out", "run", nodes=nodes, VICTIM=victim)
    assert codes == [0] * nodes, errors
    assert "failed (exitcode: -9) local_rank: " in "".join(errors)
    assert same_weights(tmp_path / "run", whole / "2" / "run", 1e-5)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 4


@pytest.mark.verify
def test_a_restart_of_torchrun_does_not_take_over_a_run_that_was_there(tmp_path):
    """What the first attempt refuses, the restart refuses too: it continues its own run alone."""
    assert train(tmp_path, 2, *TINY, "--epochs", "1", "--out", "run").wait() == [0, 0]
    before = (tmp_path / "run" / "summary.json").stat().st_mtime_ns
    codes, errors = torchrun(tmp_path, *TINY, "--epochs", "1", "--out", "run")
    assert codes == [1]
    assert errors[0].count("dale: error: run already exists") in (2, 3, 4)  # twice, by as many as get to say it
    assert (tmp_path / "run" / "summary.json").stat().st_mtime_ns == before


def test_restarts_without_a_folder_are_refused(tmp_path):
    group = train(tmp_path, 1, *TINY, variables={"TORCHELASTIC_MAX_RESTARTS": "3"})
    assert group.wait() == [2]
    assert one_line(group.err(0), "--max-restarts", "--out")


def test_not_a_number_in_one_process_stops_all(tmp_path):
    """Rank 1's images turn into NaN in the second epoch: both stop at the same step with the same line."""
    poison = (
        "import dale.data.loader as l, dale.batch as b, torch; f = l.Loader.epoch\n"
        "def epoch(self, number, start=0):\n"
        "    for batch in f(self, number, start):\n"
        "        bad = self.rank == 1 and number == 1\n"
        "        yield b.Batch(batch.images * float('nan') if bad else batch.images, *list(vars(batch).values())[1:])\n"
        "l.Loader.epoch = epoch\n"
    )
    group = train(tmp_path, 2, *TINY, "--out", "run", before=poison)
    assert group.wait(60) == [1, 1]
    for number in (0, 1):
        assert one_line(group.err(number), "the loss is not finite any more in epoch 2", "is kept"), group.err(number)
    assert len(checkpoints(tmp_path / "run")) == 1


HESITANT = SLOW.replace("0.05", "0.2") + (
    "\nimport dale.files as d; raw = d._raw\nd._raw = lambda tensor: time.sleep(0.003) or raw(tensor)\n"
)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_signal_while_a_checkpoint_is_being_written(number, whole, tmp_path):
    """Killed, the one before it counts; asked to stop, the process first ends what it writes."""
    group = train(tmp_path, 0, *TINY, "--out", "run", before=HESITANT)
    group.wait_until(lambda: any((tmp_path / "run").glob("checkpoints/.step-000000006.*.tmp")))
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step-000000003.safetensors"]
    os.kill(group.members[0].pid, number)
    assert group.wait() == [-number if number == signal.SIGKILL else 128 + number]
    names = [path.name for path in checkpoints(tmp_path / "run")]
    if number == signal.SIGKILL:
        assert names == ["step-000000003.safetensors"]
    else:
        assert int(names[-1].removesuffix(".safetensors")[5:]) >= 6
        assert one_line(group.err(0), "nothing is lost")
        assert not list((tmp_path / "run").rglob(".*.tmp"))
    assert train(tmp_path, 0, "--resume", "run", "--no-evaluate", "--quiet", "--device", "cpu").wait() == [0]
    assert same_weights(tmp_path / "run", whole / "1" / "run", 1e-5)
    assert not list((tmp_path / "run").rglob(".*.tmp"))


FULL = (
    "import resource, signal, dale.training.runs as r; f = r.RunFolder.write_checkpoint\n"
    "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    "def write(self, snapshot, metadata):\n"
    "    if snapshot.epoch == 2: resource.setrlimit(resource.RLIMIT_FSIZE, (20000, resource.RLIM_INFINITY))\n"
    "    f(self, snapshot, metadata)\n"
    "r.RunFolder.write_checkpoint = write\n"
)


@pytest.mark.parametrize("size", [0, 2])
def test_no_room_for_a_checkpoint(size, whole, tmp_path):
    """The kernel refuses to write more: one line, the checkpoint before it is whole, nothing half-written is left."""
    group = train(tmp_path, size, *TINY, "--out", "run", before=FULL)
    assert group.wait(60) == [1] * max(size, 1)
    for number in range(max(size, 1)):
        assert one_line(group.err(number), "cannot write", "checkpoints", "File too large")
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step-000000003.safetensors"]
    assert not list((tmp_path / "run").rglob(".*.tmp"))
    resumed = train(tmp_path, size, "--resume", "run", "--no-evaluate", "--quiet", "--device", "cpu")
    assert resumed.wait() == [0] * max(size, 1)
    assert same_weights(tmp_path / "run", whole / ("2" if size else "1") / "run", 1e-5)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of eight megabytes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_full_disk(small_disk, tmp_path):
    """Filled up while the run writes: one line, whole checkpoints, nothing half-written."""
    run = small_disk / "run"
    group = train(tmp_path, 0, *TINY, "--epochs", "400", "--out", "disk/run", before=SLOW)
    group.wait_until(lambda: bool(checkpoints(run)))
    with (small_disk / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"0" * 4096):
            pass
    assert group.wait(60) == [1]
    assert one_line(group.err(0), "No space left on device"), group.err(0)
    (small_disk / "ballast").unlink()
    assert not list(run.rglob(".*.tmp"))
    assert [load_file(path) for path in checkpoints(run)]


def test_flipped_bytes_in_the_newest_checkpoint(whole, tmp_path):
    """It is noticed, the one before it is taken, and the run ends as if nothing had happened."""
    group = train(tmp_path, 2, *TINY, "--out", "run", before=SLOW)
    group.wait_until(lambda: len(checkpoints(tmp_path / "run")) == 2)
    for member in group.members:
        os.kill(member.pid, signal.SIGTERM)
    group.wait()
    newest = checkpoints(tmp_path / "run")[-1]
    data = bytearray(newest.read_bytes())
    data[-5] ^= 0x10
    newest.write_bytes(data)
    again = train(tmp_path, 2, "--resume", "run", "--no-evaluate", "--device", "cpu")
    assert again.wait() == [0, 0]
    assert "its checksum does not match its content; falling back to the checkpoint before it" in again.err(0)
    assert same_weights(tmp_path / "run", whole / "2" / "run", 1e-5)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 0x10
    path.write_bytes(data)


def test_flipped_bytes_in_the_weights_of_a_run(tmp_path):
    """A model with a flipped bit is not shipped: the next best epoch is; nor is it loaded without a word."""
    assert train(tmp_path, 0, *TINY, "--epochs", "2", "--out", "run").wait() == [0]
    run, again = tmp_path / "run", ("--resume", "run", "--no-evaluate", "--quiet", "--device", "cpu")
    _flip(run / "model.safetensors")
    refused = start(tmp_path, 0, "processes", "command", arguments=["evaluate", "run", "--quiet"])
    assert refused.wait() == [1]
    assert one_line(refused.err(0), "model.safetensors is damaged: its checksum does not match")
    # two candidates, of which the better one is damaged; then both are
    tensors, facts = read_tensors(checkpoints(run)[-1])
    best = facts["selection"][0]
    other = best | {"epoch": 3 - best["epoch"], "score": best["score"] - 0.1}
    folder = RunFolder(run)
    write_tensors(checkpoints(run)[-1], tensors, facts | {"selection": [best, other]})
    folder.candidate(other["epoch"]).write_bytes(folder.candidate(best["epoch"]).read_bytes())
    _flip(folder.candidate(best["epoch"]))
    resumed = train(tmp_path, 0, *again)
    assert resumed.wait() == [0]
    assert f"candidate-0000{best['epoch']}.safetensors is damaged" in resumed.err(0)
    assert json.loads((run / "summary.json").read_text())["selected_epoch"] == other["epoch"]
    _flip(folder.candidate(other["epoch"]))
    resumed = train(tmp_path, 0, *again)
    assert resumed.wait() == [1]
    assert one_line(resumed.err(0), "is damaged", "no other is left")


CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
#include <sys/time.h>
static const long by[] = {0, 100000000, -100000000, 5, -3};
static long jump(void) { static unsigned long n; return by[n++ % 5]; }
int clock_gettime(clockid_t id, struct timespec *t) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int code = real(id, t);
  if (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE) t->tv_sec += jump();
  return code;
}
time_t time(time_t *t) { struct timespec s; clock_gettime(CLOCK_REALTIME, &s); if (t) *t = s.tv_sec; return s.tv_sec; }
int gettimeofday(struct timeval *t, void *z) {
  struct timespec s; clock_gettime(CLOCK_REALTIME, &s); t->tv_sec = s.tv_sec; t->tv_usec = s.tv_nsec / 1000; return 0;
}
"""


@pytest.mark.verify
def test_a_system_clock_that_jumps(whole, tmp_path):
    """Below Python: whatever library of either process asks for the time of day, it is years off, in turns."""
    if shutil.which("cc") is None:
        pytest.skip("making the clock jump needs a C compiler")
    (tmp_path / "clock.c").write_text(CLOCK)
    words = ["cc", "-shared", "-fPIC", "-o", "clock.so", "clock.c", "-ldl"]
    subprocess.run(words, cwd=tmp_path, check=True, capture_output=True)
    codes, errors = torchrun(tmp_path, *TINY, "--out", "run", LD_PRELOAD=str(tmp_path / "clock.so"))
    assert codes == [0], errors
    assert same_weights(tmp_path / "run", whole / "2" / "run", 1e-6)
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        assert 0.0 < json.loads(line)["seconds"]["train"] < 1000.0


def test_flipped_bytes_in_a_data_file(tmp_path):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (300, 8, 8), dtype=np.uint8)
    np.savez_compressed(tmp_path / "mine.npz", images=images, labels=rng.integers(0, 10, 300))
    data = bytearray((tmp_path / "mine.npz").read_bytes())
    data[len(data) // 3] ^= 0x01
    (tmp_path / "mine.npz").write_bytes(data)
    group = train(tmp_path, 0, *TINY, "--dataset", "mine.npz", "--out", "run")
    assert group.wait() == [1]
    assert one_line(group.err(0), "mine.npz")
    assert not (tmp_path / "run").exists()


def test_a_clock_that_jumps(whole, tmp_path):
    """Years forwards and backwards at every look: the same weights, and durations that make sense."""
    jump = (
        "import time, datetime, itertools; real = time.time\n"
        "jumps = itertools.cycle((0.0, 1e8, -1e8, 5.0, -3.0))\n"
        "time.time = lambda: real() + next(jumps)\n"
        "time.time_ns = lambda: int(time.time() * 1e9)\n"
    )
    assert train(tmp_path, 2, *TINY, "--out", "run", before=jump).wait() == [0, 0]
    assert same_weights(tmp_path / "run", whole / "2" / "run", 1e-6)
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        assert 0.0 < json.loads(line)["seconds"]["train"] < 1000.0


def test_checkpoints_are_ordered_by_step_and_not_by_their_time(tmp_path):
    """Files from the future and from 1970, as a clock that jumps leaves them."""
    group = train(tmp_path, 0, *TINY, "--out", "run", before=SLOW)
    group.wait_until(lambda: len(checkpoints(tmp_path / "run")) == 2)
    os.kill(group.members[0].pid, signal.SIGKILL)
    group.wait()
    older, newer = checkpoints(tmp_path / "run")
    os.utime(newer, (0, 0))
    os.utime(older, (4e9, 4e9))
    newer.write_bytes(newer.read_bytes()[:-1])
    again = train(tmp_path, 0, "--resume", "run", "--no-evaluate", "--device", "cpu")
    assert again.wait() == [0]
    assert newer.name in again.err(0)  # tried first, and found damaged


@pytest.mark.parametrize("size", [0, 2])
def test_two_runs_in_one_folder(size, tmp_path):
    """The second is turned away with one line, and the first does not notice."""
    group = train(tmp_path / "a", 0, *TINY, "--epochs", "30", "--out", str(tmp_path / "run"), before=SLOW)
    group.wait_until(lambda: bool(checkpoints(tmp_path / "run")))
    intruder = train(tmp_path / "b", size, "--resume", str(tmp_path / "run"), "--quiet", "--device", "cpu")
    assert intruder.wait(60) == [1] * max(size, 1)
    for number in range(max(size, 1)):
        assert one_line(intruder.err(number), "is in use: another process is training in it")
    assert group.members[0].is_alive()
    os.kill(group.members[0].pid, signal.SIGTERM)
    assert group.wait() == [128 + signal.SIGTERM]


def _trainings(place: Path) -> list[int]:
    """The processes that train below a folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"train" in words and any(str(place).encode() in word for word in words):
            found.append(int(entry.parent.name))
    return found


@pytest.fixture
def sweep_file(tmp_path):
    base = {TINY[n].removeprefix("--"): TINY[n + 1] for n in range(0, len(TINY) - 2, 2)}
    plain = {"base": base | {"no-evaluate": True, "epochs": 300}, "grid": {"seed": [0, 1]}}
    (tmp_path / "sweep.yaml").write_text(json.dumps(plain))
    return tmp_path / "sweep.yaml"


def test_sigkill_of_a_sweep_worker_and_of_the_sweep(sweep_file, tmp_path):
    """A killed worker is listed; the sweep killed, its workers die with it; the same command continues both."""
    arguments = ["sweep", "sweep.yaml", "--out", str(tmp_path / "out"), "--workers", "2"]
    sweep = start(tmp_path, 0, "processes", "command", arguments=arguments)
    runs = [tmp_path / "out" / f"seed={seed}" for seed in (0, 1)]
    sweep.wait_until(lambda: all(checkpoints(run) for run in runs), 120)
    (first,) = _trainings(runs[0])
    os.kill(first, signal.SIGKILL)
    sweep.wait_until(lambda: "seed=0 failed" in sweep.err(0))
    assert "seed=0 failed: killed by SIGKILL; run the sweep again to continue it" in sweep.err(0)
    assert "seed=0,failed" in (tmp_path / "out" / "results.csv").read_text().replace('"', "").replace("0,0,", "0,")
    assert _trainings(runs[1])
    os.kill(sweep.members[0].pid, signal.SIGKILL)
    sweep.wait()
    limit = time.monotonic() + 10
    while _trainings(tmp_path) and time.monotonic() < limit:
        time.sleep(0.01)
    assert not _trainings(tmp_path)
    done = [int(checkpoints(run)[-1].stem.removeprefix("step-")) for run in runs]
    again = start(tmp_path, 0, "processes", "command", arguments=arguments, before="import os; os.setsid()")
    again.wait_until(lambda: all(int(checkpoints(r)[-1].stem[5:]) > n for r, n in zip(runs, done, strict=True)), 120)
    assert again.err(0).count("(continued)") == 2
    assert "seed=1,running" in (tmp_path / "out" / "results.csv").read_text().replace("1,1,", "1,")
    os.killpg(again.members[0].pid, signal.SIGINT)  # a Ctrl-C in the terminal, which reaches the whole group
    assert again.wait() == [128 + signal.SIGINT]
    assert one_line(again.err(0), "what the runs had done is saved")
    for seed in (0, 1):
        assert "nothing is lost" in (tmp_path / "out" / "logs" / f"seed={seed}.log").read_text()


def test_every_promise_names_tests_that_exist():
    """`docs/scaling.md` puts each promise next to its test."""
    tests = Path(__file__).parent
    page = (tests.parent / "docs" / "scaling.md").read_text()
    table = [line for line in page.splitlines() if line.startswith("| ") and "---" not in line][1:]
    assert len(table) >= 15
    for line in table:
        *_, promise, cell, _ = line.split("|")
        named = re.findall(r"`([\w/]*\.py)?(?:::(\w+))?`", cell)
        assert named or cell.strip() == "the same", line
        file = ""
        for path, test in named:
            file = path or file
            content = (tests / file).read_text()
            assert not test or f"def {test}(" in content, f"{promise}: {file}::{test}"
