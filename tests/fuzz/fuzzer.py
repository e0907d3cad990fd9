"""A seeded mutation fuzzer for the readers of files that may come from strangers.

Every input is made from (seed, number) alone, so that a failure can be made again. An input passes when the reader
takes it or refuses it with a `DaleError`; anything else raised, more processor time than `LIMIT` seconds, or more
memory than `MEMORY` beyond what the process started with is a failure, and its input is kept. Run it by hand:

    python tests/fuzz/fuzzer.py --count 100000            # every target
    python tests/fuzz/fuzzer.py npz --count 1000 --seed 7
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import random
import resource
import signal
import struct
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import numpy as np

CORPUS = Path(__file__).with_name("corpus")
LIMIT = 10.0  # seconds of processor time for one input: a busy machine is not a hang
MEMORY = 2 * 2**30
_NUMBERS = (
    0,
    1,
    2,
    7,
    127,
    128,
    255,
    256,
    1 << 15,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    (1 << 63) - 1,
    (1 << 64) - 1,
)
_WORDS = (
    *(b"nan", b".inf", b"-.inf", b"1e999", b"-1", b"null", b"true", b"[]", b"{}", b"''", b"~", b"1" * 5000, b"0x1F"),
    *(
        b"&a [*a, *a]",
        b"*a",
        b"!!python/object/apply:os.system ['true']",
        b"!!binary aGk=",
        b"[[[[[[",
        b"{{{{",
        b"- - - -",
    ),
    *(
        b"os:system",
        b"type: ",
        b"__class__",
        b"\\u0000",
        b"\\ud800",
        b"\xff\xfe",
        b"\x00",
        b"\t",
        b"\r\n",
        b": ",
        b"? ",
    ),
    *(b'"', b"'", b"#", b"%YAML 1.1\n---\n", b"2020-01-01", b"1:30:00", b"<<: *a", b"10" * 30, b"1_000", b"-0.0"),
)


class TooSlowError(BaseException):
    """One input took longer than the limit (not an Exception: no reader may swallow it)."""


def mutate(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """Change some bytes: flips, extreme numbers, words, cuts, repetitions, pieces of other inputs."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 5, 10))):
        place = rng.randrange(len(changed) + 1)
        kind = rng.randrange(9)
        if kind == 0 and changed:
            changed[min(place, len(changed) - 1)] ^= 1 << rng.randrange(8)
        elif kind == 1 and changed:
            changed[min(place, len(changed) - 1)] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
        elif kind == 2:
            width, order = rng.choice((1, 2, 4, 8)), rng.choice(("little", "big"))
            number = rng.choice(_NUMBERS) & ((1 << 8 * width) - 1)
            changed[place : place + width] = number.to_bytes(width, order)  # type: ignore[arg-type]
        elif kind == 3:
            changed[place:place] = rng.choice(_WORDS)
        elif kind == 4:
            changed[place : place + rng.randrange(1, 40)] = rng.choice(_WORDS)
        elif kind == 5:
            del changed[place : place + rng.choice((1, 2, 8, 64, 4096))]
        elif kind == 6:
            piece = changed[place : place + rng.choice((1, 4, 16, 256))]
            changed[place:place] = piece * rng.choice((1, 2, 50))
        elif kind == 7:
            del changed[place:]
        else:
            other = rng.choice(others)
            start = rng.randrange(len(other) + 1)
            changed[place : place + rng.randrange(64)] = other[start : start + rng.randrange(64)]
    return bytes(changed[: 1 << 20])


@dataclass
class Target:
    """A reader, and kinds of input: sources to mutate, and how an input is made of what came out."""

    read: Callable[[Path], object]
    kinds: list[tuple[list[bytes], Callable[[bytes], bytes]]]
    file: str = "input"

    def make(self, seed: int, number: int) -> bytes:
        """Input `number` of a seed."""
        rng = random.Random(f"{seed}/{number}")
        sources, wrap = rng.choice(self.kinds)
        return wrap(mutate(rng, rng.choice(sources), sources))

    def untouched(self) -> list[bytes]:
        """The inputs before any mutation: the reader takes them all."""
        return [wrap(source) for sources, wrap in self.kinds for source in sources]


def _readers(*readers: Callable[[], object]) -> None:
    """Let several readers try one file; it is refused where all refuse it."""
    from dale.errors import DaleError

    refusals = []
    for read in readers:
        try:
            read()
        except DaleError as error:
            check_line(error)
            refusals.append(error)
    if len(refusals) == len(readers):
        raise refusals[0]


def _idx() -> Target:
    from dale.data.readers import read_idx

    rng = np.random.default_rng(0)
    images = bytes([0, 0, 8, 3]) + struct.pack(">3I", 5, 4, 4) + rng.bytes(80)
    labels = bytes([0, 0, 8, 1]) + struct.pack(">I", 5) + bytes(range(5))

    def pack(data: bytes) -> bytes:
        return gzip.compress(data, 1, mtime=0)

    def read(path: Path) -> None:
        _readers(lambda: read_idx(path, 3), lambda: read_idx(path, 1))

    return Target(read, [([pack(images), pack(labels)], bytes), ([images, labels], pack)])


def _cifar() -> Target:
    from dale.data.readers import read_cifar

    record = np.random.default_rng(0).bytes(3072)

    def read(path: Path) -> None:
        _readers(lambda: read_cifar(path, 1, 10), lambda: read_cifar(path, 2, 100))

    return Target(read, [([b"\x03" + record, (b"\x09" + record) * 2, b"\x01\x63" + record], bytes)])


def _npz() -> Target:
    from dale.data.user import read_user_npz

    rng = np.random.default_rng(0)
    arrays = {
        "images": rng.integers(0, 255, (6, 4, 4), dtype=np.uint8),
        "labels": np.array([0, 1, 2, 0, 1, 2]),
        "groups": np.array([0, 0, 1, 1, 0, 1], dtype=np.int32),
        "class_names": np.array(["a", "b", "c"]),
    }
    floats = {"images": rng.random((4, 3, 4, 4), dtype=np.float32), "labels": np.array([0, 1, 0, 1], dtype=np.uint8)}
    members = {}
    for name, array in arrays.items():
        file = io.BytesIO()
        np.save(file, array)
        members[name] = file.getvalue()

    def whole(content: dict[str, np.ndarray], save: Callable[..., None]) -> bytes:
        file = io.BytesIO()
        save(file, **content)
        return file.getvalue()

    def packed(name: str, compression: int) -> Callable[[bytes], bytes]:
        """An archive that is in order but for one member: what a check of the archive alone would pass."""

        def pack(data: bytes) -> bytes:
            file = io.BytesIO()
            with zipfile.ZipFile(file, "w", compression) as archive:
                for other, content in members.items():
                    archive.writestr(f"{other}.npy", data if other == name else content)
            return file.getvalue()

        return pack

    archives = [whole(arrays, np.savez), whole(arrays, np.savez_compressed), whole(floats, np.savez)]
    kinds = [([members[n]], packed(n, c)) for n in arrays for c in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)]
    return Target(read_user_npz, [*[(archives, bytes)] * 4, *kinds], "input.npz")


def _safetensors() -> Target:
    import torch
    from safetensors.torch import save
    from torch import nn

    from dale.files import digest, read_tensors, write_tensors
    from dale.models import load_weights
    from dale.training.state import TrainState

    def state() -> TrainState:
        model = nn.Linear(3, 2)
        return TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), ())

    fresh = state()
    fresh.model(torch.ones(1, 3)).sum().backward()
    fresh.optimiser.step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        write_tensors(path, fresh.tensors(), fresh.facts())
        whole = path.read_bytes()
    weights = save(fresh.model.state_dict(), metadata={"format": "pt"})
    facts = json.dumps(fresh.facts()).encode()

    def resealed(data: bytes) -> bytes:
        """A checkpoint whose facts are changed and whose checksum is right: what a stranger could make."""
        text = data.decode("utf-8", "replace")
        tensors = {name: tensor.clone() for name, tensor in fresh.tensors().items()}
        return save(tensors, {"dale": text, "digest": digest(tensors, text)})

    def read(path: Path) -> None:
        _readers(lambda: state().restore(*read_tensors(path)), lambda: load_weights(nn.Linear(3, 2), path))

    return Target(read, [([whole, weights], bytes), ([facts], resealed)])


def _yaml() -> Target:
    from dale.files import read_text
    from dale.training.config import RunConfig
    from dale.training.recipes import default_config

    seeds = [default_config(name).to_yaml().encode() for name in ("digits", "cifar10")]
    small = b"objective: {type: Algorithm, name: trades, perturbations: {type: L2, epsilon: 1.0}, options: {beta: 3}}\n"
    written = b"format: 1\nobjective: {type: Objective, nominal_weight: 1.0}\n"
    written += b"training: {epochs: 3, augmentation: [RandomFlip]}\n"

    def read(path: Path) -> None:
        RunConfig.from_yaml(read_text(path), where="config").build_objective()

    return Target(read, [(seeds, bytes), ([small, written], bytes)], "config.yaml")


def _metrics() -> Target:
    from dale.reports.runs import read_run
    from dale.training.runs import RunFolder

    record = {
        "epoch": 1,
        "epochs": 3,
        "loss": 1.5,
        "robust_loss": None,
        "constraints": [{"name": "loss", "limit": [0.1], "measure": [0.3], "multiplier": [0.5], "violation": [0.2]}],
        "validation": {"clean_accuracy": 0.5, "constraints": [{"measure": [0.2]}]},
        "seconds": {"train": 1.0, "total": 1.5},
    }
    lines = "".join(json.dumps(record | {"epoch": n}) + "\n" for n in (1, 2, 3)).encode()

    def read(path: Path) -> None:
        config = path.with_name("config.yaml")
        if not config.exists():
            config.write_text("format: 1\n")
        read_run(path.parent)
        RunFolder(path.parent).metrics()

    return Target(read, [([lines, lines[:-30]], bytes)], "metrics.jsonl")


TARGETS: dict[str, Callable[[], Target]] = {
    "idx": _idx,
    "cifar": _cifar,
    "npz": _npz,
    "safetensors": _safetensors,
    "yaml": _yaml,
    "metrics": _metrics,
}


def check_line(error: BaseException) -> None:
    """A refusal is one line with something in it."""
    text = str(error)
    assert text.strip(), "an error without a message"
    assert len(text) < 20_000, f"an error of {len(text)} characters"


def bound_memory() -> None:
    """Let this process have `MEMORY` more bytes than it has now; a reader that wants more gets MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def attempt(target: Target, path: Path, data: bytes) -> tuple[str, BaseException | None]:
    """Read one input: "read", "refused", or "failed" with the error."""
    from dale.errors import DaleError

    path.write_bytes(data)
    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    try:
        target.read(path)
    except DaleError as error:
        try:
            check_line(error)
        except AssertionError as bad:
            return "failed", bad
        return "refused", error
    except (Exception, TooSlowError) as error:
        return "failed", error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
    return "read", None


def fuzz(name: str, count: int, seed: int = 0, keep: Path | None = CORPUS) -> dict[str, object]:
    """Feed `count` inputs to a target; returns counts, the slowest input's seconds, and a line for each failure."""

    def slow(number: int, frame: FrameType | None) -> None:
        raise TooSlowError

    before = signal.signal(signal.SIGPROF, slow)
    target = TARGETS[name]()
    counts = {"read": 0, "refused": 0, "failed": 0}
    failures: dict[str, str] = {}
    slowest, began = 0.0, time.perf_counter()
    shm = "/dev/shm" if Path("/dev/shm").is_dir() else None
    try:
        with tempfile.TemporaryDirectory(dir=shm) as folder:
            path = Path(folder) / target.file
            for number in range(count):
                data = target.make(seed, number)
                start = time.perf_counter()
                outcome, error = attempt(target, path, data)
                slowest = max(slowest, time.perf_counter() - start)
                counts[outcome] += 1
                if outcome == "failed":
                    line = f"{type(error).__name__}: {str(error)[:150]}"
                    if line not in failures and len(failures) < 50:
                        failures[line] = f"input {number} of seed {seed}"
                        if keep is not None:
                            (keep / name).mkdir(parents=True, exist_ok=True)
                            digest = hashlib.blake2b(data, digest_size=6).hexdigest()
                            (keep / name / digest).write_bytes(data)
    finally:
        signal.signal(signal.SIGPROF, before)
    seconds = time.perf_counter() - began
    return {
        "target": name,
        "inputs": count,
        **counts,
        "slowest_seconds": round(slowest, 3),
        "seconds": round(seconds, 1),
        "failures": failures,
    }


def main() -> int:
    """Fuzz from the command line; one JSON line per target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", default=list(TARGETS), metavar="TARGET")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-corpus", action="store_true", help="do not keep inputs that fail")
    args = parser.parse_args()
    import dale.reports
    import dale.training  # noqa: F401  (what they load is not the reader's memory)

    bound_memory()
    failed = 0
    for name in args.targets:
        result = fuzz(name, args.count, args.seed, None if args.no_corpus else CORPUS)
        failed += bool(result["failed"])
        print(json.dumps(result), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
