"""The machine: what a processor announces and refuses, what the C library keeps."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dale import environment
from dale.errors import UsageError


@pytest.fixture
def anew() -> Iterator[None]:
    """Without what an earlier call found out, and leaving nothing to a later one."""
    environment.require_bfloat16.cache_clear()
    yield
    environment.require_bfloat16.cache_clear()


@pytest.mark.usefixtures("anew")
def test_the_trial_of_bfloat16_runs_to_its_end_where_it_is_not_killed() -> None:
    done = subprocess.run([sys.executable, "-c", environment._BFLOAT16], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    environment.require_bfloat16()


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize(
    ("survived", "advice"),
    [
        (
            ["AVX512_CORE_BF16", "AVX512_CORE"],
            "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment, or train in",
        ),
        (["AVX512_CORE"], "set ONEDNN_MAX_CPU_ISA=AVX512_CORE in the environment, or train in float32"),
        ([], "refuses them; train in float32"),
    ],
)
def test_a_processor_that_kills_it_is_named_with_the_fastest_way_out(
    survived: list[str], advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)  # which the tests run with
    trial = f"if os.environ.get('ONEDNN_MAX_CPU_ISA') not in {survived}: os.kill(os.getpid(), signal.SIGILL)"
    monkeypatch.setattr(environment, "_BFLOAT16", f"import os, signal\n{trial}")
    with pytest.raises(UsageError, match=advice):
        environment.require_bfloat16()


def _fresh_pages(count: int) -> int:
    """Pages that the system hands out for tensors of 64 MiB, made and dropped one after the other."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        torch.ones(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def _held() -> int:
    """Bytes of memory that the process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are of GNU's C library")
def test_memory_is_used_again_inside_and_given_back_at_the_end() -> None:
    cpu, pages = torch.device("cpu"), 2**26 // resource.getpagesize()
    before = _held()
    with environment.kept_memory(cpu):
        _fresh_pages(20)  # fetched once or a few times, until they fit into what is there
        with environment.kept_memory(cpu):  # as where an evaluation ends inside a training
            assert _fresh_pages(5) < pages
        assert _fresh_pages(5) < pages
        assert _held() > before + 2**25
    assert _held() < before + 2**25


def test_a_c_library_that_refuses_so_much_gets_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused without another word, the threshold would stay where a new process has it, 4 MiB tensors above it."""
    taken: dict[int, int] = {}

    class Library:
        def mallopt(self, option: int, value: int) -> int:
            if option == environment._MMAP_THRESHOLD and value > 2**25:
                return 0
            taken[option] = value
            return 1

        def malloc_trim(self, _: int) -> None: ...

    monkeypatch.setattr(environment, "_glibc", Library)
    with environment.kept_memory(torch.device("cpu")):
        assert taken == {environment._MMAP_THRESHOLD: 2**25, environment._TRIM_THRESHOLD: 2**31 - 1}


def test_memory_is_left_alone_where_tensors_are_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_glibc", lambda: pytest.fail("asked for the C library"))
    with environment.kept_memory(torch.device("meta")):
        pass
