"""Runs of a sweep as processes of this machine: so many at a time, each `python -m dale train` in its own folder.

A run that was begun is continued, one that ended well is left alone. A process dies with the one that started it, so
that nothing goes on unseen; what it had saved is continued the next time.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dale.errors import DaleError
from dale.experiments.results import Place
from dale.experiments.sweep import TrainOptions

# The process asks the kernel to be killed when the one that started it dies, even by SIGKILL (PR_SET_PDEATHSIG); one
# whose parent died before that is an orphan already. Not in `preexec_fn`, which is unsafe beside threads.
_BOOT = (
    "import ctypes, os, sys; parent = int(sys.argv.pop(1)); "
    "sys.platform == 'linux' and ctypes.CDLL(None).prctl(1, 9); os.getppid() == parent or sys.exit(1); "
    "from dale.cli import main; sys.exit(main(sys.argv[1:]))"
)
POLL = 0.05  # seconds between two looks at the processes
Report = Callable[[str, Place, str], None]  # ("started" | "finished" | "failed" | "running", place, text)


@dataclass(frozen=True)
class Launch:
    """How runs are started: what `dale train` takes, whether code in options is honoured, how many threads each has."""

    kinds: TrainOptions
    trust: bool = False
    threads: int = 0
    python: str = field(default_factory=lambda: sys.executable)

    def command(self, place: Place) -> list[str]:
        """The command of a run, whose process ends with this one."""
        return [self.python, "-c", _BOOT, str(os.getpid()), *self.words(place)]

    def words(self, place: Place) -> list[str]:
        """The words after `dale`: from the start, or from where the run was."""
        begin = ["train", "--quiet", *(["--trust"] if self.trust else [])]
        if place.begun:
            return [*begin, f"--resume={place.folder}", *place.run.arguments(self.kinds, resuming=True)]
        return [*begin, f"--out={place.folder}", *place.run.arguments(self.kinds)]

    def environment(self) -> dict[str, str]:
        """The environment of a run: ours, with its share of the cores, and nothing of a torchrun above us."""
        own = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")}
        return own | ({"OMP_NUM_THREADS": str(self.threads)} if self.threads and "OMP_NUM_THREADS" not in own else {})

    def start(self, place: Place, visible: str | None = None) -> subprocess.Popen[bytes]:
        """Start the process of a run; its output goes to its log, `visible` names the GPU it sees."""
        try:
            place.log.parent.mkdir(parents=True, exist_ok=True)
            with place.log.open("ab") as log:
                return subprocess.Popen(
                    self.command(place),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # a Ctrl-C in the terminal is ours alone: runs are asked to stop once
                    env=self.environment() | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}),
                )
        except OSError as error:
            raise DaleError(f"cannot start a run of {place.out}: {error.strerror or error}") from error


def run_once(launch: Launch, place: Place) -> str | None:
    """Bring one run to its end in a process of its own and wait; None, or the last line of its error."""
    if place.finished:
        return None
    began = time.perf_counter()
    code = launch.start(place).wait()
    if code == 0:
        place.mark_finished(time.perf_counter() - began)
        return None
    return failure(place, code)


def failure(place: Place, code: int) -> str:
    """One line about a process that ended badly."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}; run the sweep again to continue it"
    return place.last_error()


@contextlib.contextmanager
def _stoppable() -> Iterator[Callable[[], int]]:
    """Note Ctrl-C and SIGTERM instead of dying of them."""
    received = 0

    def note(number: int, frame: object) -> None:
        nonlocal received
        received = number

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_local(
    launch: Launch, places: Sequence[Place], workers: int, report: Report, gpus: Sequence[str] = ()
) -> dict[str, str]:
    """Bring runs to their end, `workers` at a time; returns the last error of each that failed, by name.

    With `gpus` each process sees one of them. Asked to stop, it asks the processes, which save what they have.
    """
    waiting = [place for place in places if not place.finished]
    active: dict[int, tuple[Place, subprocess.Popen[bytes], float]] = {}
    errors: dict[str, str] = {}
    with _stoppable() as received:
        asked = 0
        while active or (waiting and not received()):
            if received() and not asked:
                asked = received()
                for _, process, _ in active.values():
                    process.send_signal(signal.SIGTERM)
            while waiting and not asked and len(active) < workers:
                place = waiting.pop(0)
                slot = next(number for number in range(workers) if number not in active)
                report("started", place, "continued" if place.begun else "")
                visible = gpus[slot % len(gpus)] if gpus else None
                active[slot] = (place, launch.start(place, visible), time.perf_counter())
            time.sleep(POLL)
            for slot, (place, process, began) in list(active.items()):
                code = process.poll()
                if code is None:
                    report("running", place, "")
                    continue
                del active[slot]
                seconds = time.perf_counter() - began
                if code == 0:
                    place.mark_finished(seconds)
                    report("finished", place, f"{seconds:.1f} s")
                elif not asked:
                    errors[place.run.name] = failure(place, code)
                    report("failed", place, errors[place.run.name])
    if asked:
        stop = DaleError("stopped; what the runs had done is saved. The same command continues them")
        stop.exit_code = 128 + asked
        raise stop
    return errors


def gpu_names() -> list[str]:
    """The GPUs that this machine offers us."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        names = [name.strip() for name in given.split(",")]
        return list(itertools.takewhile(lambda name: name and not name.startswith("-"), names))  # as CUDA reads it
    return [path.name.removeprefix("nvidia") for path in sorted(Path("/dev").glob("nvidia[0-9]*"))]
