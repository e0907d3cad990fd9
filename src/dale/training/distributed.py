"""Several processes, one training: who we are, and the few messages that keep all of them in one state.

`torchrun` starts the processes and tells each its rank by environment variables; gloo carries messages between CPUs,
NCCL between GPUs. Every process holds the same training state and sees its own share of each batch. The first process
(rank 0) alone reads and writes the run folder. Alone, without torchrun, every function here costs nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import Store

from dale import errors
from dale.data import Split
from dale.environment import find_device
from dale.errors import DaleError, UsageError
from dale.training.meeting import meet
from dale.training.state import TrainState

T = TypeVar("T")

# Groups that we have parted from. Gloo's threads need Python's lock to let go of the last tensor they sent; were the
# group's last reference dropped just then, under that lock, it would wait for them and they for it: so none is dropped.
_left: list[Any] = []
# The last messages that gloo carried. Its threads let go of one a moment after it has arrived, and whoever lets go last
# needs Python's lock. A process that is ending gives the lock to nobody any more and would be aborted instead, with its
# work done; so we are the last, and of these we never let go.
_carried: deque[dist.Work] = deque(maxlen=16)
_met: dict[str, Any] = {}  # the store we met through, and whether an earlier group of torchrun's has begun the run
_BEGUN = "dale/begun"


def reduce_(tensor: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce a tensor over all processes, in place."""
    return _arrived(tensor, dist.all_reduce(tensor, operation, async_op=not tensor.is_cuda))


def _send_(tensor: Tensor) -> Tensor:
    """Make a tensor that of the first process, in place."""
    return _arrived(tensor, dist.broadcast(tensor, 0, async_op=not tensor.is_cuda))


def _all(tensor: Tensor) -> list[Tensor]:
    """The tensors of all processes, which have one shape."""
    parts = [torch.zeros_like(tensor) for _ in range(world_size())]
    _arrived(tensor, dist.all_gather(parts, tensor, async_op=not tensor.is_cuda))
    return parts


def _arrived(tensor: Tensor, message: dist.Work | None) -> Tensor:
    """Wait for a message of gloo's; NCCL's are in the order of the device, and nothing is returned for them."""
    if message is not None:
        message.wait()
        _carried.append(message)
    return tensor


def launched() -> bool:
    """Tell whether torchrun, or something that speaks like it, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ


def restarted() -> bool:
    """Tell whether torchrun started the processes again after one of them had died: the run is then continued."""
    if not launched():
        return False
    return bool(_met["again"]) if "again" in _met else _counted()


def may_restart() -> bool:
    """Tell whether torchrun was asked to start the processes again should one die."""
    return launched() and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") not in ("", "0")


def active() -> bool:
    """Tell whether this process shares its work with others (or is the only one of a group)."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """This process's number; 0 where it is alone."""
    return dist.get_rank() if active() else 0


def world_size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if active() else 1


def is_main() -> bool:
    """Tell whether this is the process that reads and writes files and speaks to people."""
    return rank() == 0


def local_device(name: str | None) -> torch.device:
    """The device of this process: with several on a machine, each takes the GPU of its local rank."""
    if not launched() or name == "cpu" or (name is None and not torch.cuda.is_available()):
        return find_device(name)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if name not in (None, "cuda"):
        raise UsageError(f"--device {name}: under torchrun each process takes a GPU of its own; give cuda or cpu")
    if local >= torch.cuda.device_count():
        raise UsageError(
            f"process {local} of this machine finds {torch.cuda.device_count()} GPUs; start as many processes as GPUs"
        )
    torch.cuda.set_device(local)
    return find_device(f"cuda:{local}")


@contextlib.contextmanager
def connected(device: str | None = None) -> Iterator[torch.device]:
    """Join the other processes where torchrun started us, yield our device, and part at the end.

    A process that went away shows as one line in all others, never as a hang: gloo and torchrun both notice.
    """
    place = local_device(device)
    if not launched() or active():
        yield place
        return
    try:
        _met["store"], store, number, size, _met["again"] = meet(_begun_before)
        backend, own = ("cpu:gloo,cuda:nccl", place) if place.type == "cuda" else ("gloo", None)
        dist.init_process_group(backend, store=store, rank=number, world_size=size, device_id=own)
    except (RuntimeError, ValueError) as error:
        raise DaleError(f"the processes of this run cannot reach one another: {_line(error)}") from error
    try:
        yield place
    except RuntimeError as error:
        if not _from_messages(error):
            raise
        raise DaleError(
            f"process {rank()} lost contact with another one of this run, whose own message says why ({_line(error)}); "
            "the run can be continued with --resume"
        ) from error
    finally:
        _left.append(dist.group.WORLD)
        for message in _carried:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(message))
        if place.type != "cuda" or world_size() == 1:  # NCCL may wait for a process that is gone; exiting does not
            dist.destroy_process_group()


def _begun_before(store: Store) -> bool:
    """Tell whether an earlier group has begun the run.

    torchrun's store knows, where it keeps one over its restarts. Its count of them is each machine's own, and a
    restart may follow on a refusal that left the run folder of somebody else alone.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return bool(store.check([_BEGUN]))
    return _counted()


def _counted() -> bool:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0")


def begin() -> None:
    """Note that the run is about to make its folder: should torchrun start us again, it is continued there."""
    if "store" in _met:
        _met["store"].set(_BEGUN, "yes")


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


def _from_messages(error: RuntimeError) -> bool:
    text = str(error)
    return isinstance(error, dist.DistError) or any(word in text for word in ("gloo", "NCCL", "Connection closed"))


def total(*tensors: Tensor) -> list[Tensor]:
    """The sums of float tensors over all processes, in one message."""
    if world_size() == 1:
        return list(tensors)
    flat = reduce_(torch.cat([tensor.detach().reshape(-1).float() for tensor in tensors]))
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def added(tensor: Tensor) -> Tensor:
    """The sum of a tensor over all processes, in its own type: counts stay exact."""
    return tensor if world_size() == 1 else reduce_(tensor.clone())


def agreed(number: int) -> int:
    """The largest of the processes' numbers: a signal that reached one of them stops all at the same step."""
    if world_size() == 1:
        return number
    return int(reduce_(torch.tensor([number]), dist.ReduceOp.MAX))


class Agreement:
    """`agreed`, one question late: each call returns the answer to the one before it, so that nobody waits for it."""

    def __init__(self) -> None:
        self._asked: tuple[Tensor, Any] | None = None

    def __call__(self, number: int) -> int:
        """Ask for the largest of the processes' numbers, and return that of the last time (alone: this one)."""
        if world_size() == 1:
            return number
        answer = self.settled()
        asked = torch.tensor([number])
        self._asked = asked, dist.all_reduce(asked, dist.ReduceOp.MAX, async_op=True)
        return answer

    def settled(self) -> int:
        """The answer to the last question, which is then forgotten; 0 where none was asked."""
        if self._asked is None:
            return 0
        asked, self._asked = self._asked, None
        return int(_arrived(*asked))


def share(split: Split) -> Split:
    """This process's contiguous part of a split; the parts of all processes are disjoint and make up the whole."""
    size = world_size()
    if size == 1:
        return split
    part = slice(rank() * len(split) // size, (rank() + 1) * len(split) // size)
    groups = None if split.groups is None else split.groups[part]
    return replace(split, images=split.images[part], labels=split.labels[part], index=split.index[part], groups=groups)


def gathered(rows: Tensor) -> Tensor:
    """The rows of all processes, in the order of their ranks; their numbers may differ, and some may have none."""
    if world_size() == 1:
        return rows
    shape = torch.zeros(4, dtype=torch.int64)
    shape[: rows.dim()] = torch.tensor(rows.shape)
    shapes = _all(shape)
    counts = [int(s[0]) for s in shapes]
    whole = next(s for s, count in zip(shapes, counts, strict=True) if count)[1 : rows.dim()].tolist()
    padded = rows.new_zeros((max(counts), *whole))
    padded[: len(rows)] = rows.reshape(len(rows), *whole)
    return torch.cat([part[:count] for part, count in zip(_all(padded), counts, strict=True)])


def told(text: str = "") -> str:
    """What the first process says, everywhere."""
    if world_size() == 1:
        return text
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else torch.zeros(0, dtype=torch.uint8)
    count = int(_send_(torch.tensor([len(data)])))
    if not is_main():
        data = torch.zeros(count, dtype=torch.uint8)
    if count:
        _send_(data)
    return bytes(data.tolist()).decode()


def first(action: Callable[[], T]) -> T | None:
    """Let the first process do something, as all writing is; where it fails, all processes raise its error."""
    if world_size() == 1:
        return action()
    result, failure = None, ""
    if is_main():
        try:
            result = action()
        except DaleError as error:
            failure = json.dumps([type(error).__name__, str(error)])
    if failure := told(failure):
        kind, message = json.loads(failure)
        raise getattr(errors, kind, DaleError)(message)
    return result


@torch.no_grad()
def same_weights(model: nn.Module) -> None:
    """Give every process the first one's parameters and buffers."""
    if world_size() > 1:
        for tensor in model.state_dict().values():
            tensor.copy_(_send_(tensor.contiguous()))


def same_state(state: TrainState) -> None:
    """Give every process the training state that the first one has read, bit for bit."""
    if world_size() == 1:
        return
    device = next(state.model.parameters()).device
    tensors = state.tensors() if is_main() else {}
    listed = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()]
    plain = json.loads(told(json.dumps([state.facts(), listed]) if is_main() else ""))
    facts, listed = plain
    received = {}
    for name, dtype, shape in listed:
        held = tensors[name].to(device).contiguous() if is_main() else None
        if held is None:
            held = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        received[name] = _send_(held)
    if not is_main():
        state.restore(received, facts, "the state sent by process 0")
