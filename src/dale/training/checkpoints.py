"""Checkpoints that cost training next to nothing: a copy on the device, written to disk while the next epoch trains.

At the end of an epoch the state is copied where it lies, in milliseconds. A thread then brings the copy to the host, on
a stream of its own, and writes it. One is written at a time; where the disk is slower than training, the newest waits
and takes the place of an older one that still does. Nothing is lost by that but distance: every checkpoint is a whole
state from which the run continues exactly.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dale.training.state import TrainState


@dataclass
class Snapshot:
    """The state of one moment, in tensors of its own: `step` in all, with the `facts` beside the tensors.

    `needed` are the epochs whose weights may still be selected; `candidates` those of them that are not on disk yet.
    """

    step: int
    epoch: int
    tensors: dict[str, Tensor]
    facts: dict[str, Any]
    needed: frozenset[int]
    candidates: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    ready: torch.cuda.Event | None = None  # the copies on the device are made

    @staticmethod
    def of(state: TrainState, batches: int, *, candidate: bool = False) -> Snapshot:
        """Copy a state of a run with `batches` steps an epoch; with `candidate` its model may be selected."""
        tensors = state.tensors()
        try:
            tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        except torch.cuda.OutOfMemoryError:  # no room for a second state there: slower, but no reason to fail
            tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        ready = None
        if any(tensor.is_cuda for tensor in tensors.values()):
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        needed = frozenset(state.selection.candidates)
        candidates = {}
        if candidate and state.epoch in needed:  # one that is out already need not be written at all
            room = "model/" if state.average is None else "average/"
            shipped = {name.removeprefix(room): tensor for name, tensor in tensors.items() if name.startswith(room)}
            # as `save_weights` names them: without the prefix of torch.compile's wrapper
            candidates[state.epoch] = {name.removeprefix("_orig_mod."): tensor for name, tensor in shipped.items()}
        step = state.epoch * batches + state.batch
        return Snapshot(step, state.epoch, tensors, state.facts(), needed, candidates, ready)

    def inherit(self, older: Snapshot) -> None:
        """Take the place of a snapshot that was not written, with the candidates of its that are needed still."""
        self.candidates = {e: held for e, held in older.candidates.items() if e in self.needed} | self.candidates

    def to_host(self) -> None:
        """Bring the tensors to the CPU, contiguous, beside whatever the device is doing."""
        beside: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if self.ready is not None:
            device = next(tensor.device for tensor in self.tensors.values() if tensor.is_cuda)
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_event(self.ready)
            beside = torch.cuda.stream(stream)
        brought: dict[Tensor, Tensor] = {}  # by identity: a candidate's weights are the state's too
        with beside:
            for held in (self.tensors, *self.candidates.values()):
                for name, tensor in held.items():
                    if tensor not in brought:
                        brought[tensor] = tensor.cpu().contiguous()  # returns when it is there
                    held[name] = brought[tensor]


class Writer:
    """One thread that writes snapshots by `write`, one at a time; what goes wrong there is raised here, later."""

    def __init__(self, write: Callable[[Snapshot], None]) -> None:
        self._write = write
        self._lock = threading.Lock()
        self._waiting: Snapshot | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def put(self, snapshot: Snapshot) -> None:
        """Hand over a snapshot, and return at once; raises what went wrong with an earlier one."""
        with self._lock:
            self._raise()
            if self._waiting is not None:
                snapshot.inherit(self._waiting)
            self._waiting = snapshot
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="dale-checkpoints", daemon=True)
                self._thread.start()

    def wait(self) -> None:
        """Return when all that was handed over is on disk; raises what went wrong."""
        self.close()
        self._raise()

    def close(self) -> None:
        """Wait for what is under way, whatever becomes of it."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _work(self) -> None:
        while True:
            with self._lock:
                snapshot, self._waiting = self._waiting, None
                if snapshot is None or self._error is not None:
                    self._thread = None
                    return
            try:
                self._write(snapshot)
            except BaseException as error:
                self._error = error
