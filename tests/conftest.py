"""Fixtures that several rooms use."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from torch import nn

    from dale.batch import Batch
    from dale.data import Split

# before torch is imported: several test processes with a thread per core each would spend their time waiting
os.environ.setdefault("OMP_NUM_THREADS", "1")
# likewise: some sandboxes advertise the AMX unit of the processor and then refuse its instructions, which ends the
# process in oneDNN's bfloat16 kernels; AVX-512 computes the same tests
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

_ROOT = Path(__file__).resolve().parents[1]
_NEEDED = (
    *(f"mnist/{part}-ubyte.gz" for part in ("train-images-idx3", "train-labels-idx1")),
    *(f"mnist/{part}-ubyte.gz" for part in ("t10k-images-idx3", "t10k-labels-idx1")),
    *(f"cifar10/cifar-10-batches-bin/data_batch_{i}.bin" for i in range(1, 6)),
    "cifar10/cifar-10-batches-bin/test_batch.bin",
)


def _complete(folder: Path) -> bool:
    return all((folder / file).is_file() for file in _NEEDED)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Let one test process unpack while the others wait."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder with the real MNIST and CIFAR-10: $DALE_DATA, or unpacked once from the shared store beside us."""
    given = os.environ.get("DALE_DATA")
    if given and _complete(Path(given)):
        return Path(given)
    script = _ROOT.parent / "shared" / "data" / "unpack.py"
    if not script.is_file():
        pytest.skip("the real MNIST and CIFAR-10 are not here: set DALE_DATA to a folder that holds them")
    cache = Path(tempfile.gettempdir()) / f"dale-test-data-{getpass.getuser()}"
    with _lock(cache.with_suffix(".lock")):
        if not _complete(cache):
            part = Path(tempfile.mkdtemp(prefix=cache.name, dir=cache.parent))
            subprocess.run([sys.executable, str(script), str(part)], check=True, capture_output=True)
            if not _complete(part):
                shutil.rmtree(part)
                pytest.skip("the shared store holds only a part of MNIST and CIFAR-10")
            shutil.rmtree(cache, ignore_errors=True)
            part.rename(cache)
    return cache


@pytest.fixture(scope="session")
def victim() -> tuple[nn.Module, Split]:
    """A small trained classifier that attacks are tried on, and the digits for it."""
    from victims import trained  # torch, which not every test needs

    return trained()


@pytest.fixture
def batch(victim: tuple[nn.Module, Split]) -> Batch:
    return next(victim[1].batches(64))
