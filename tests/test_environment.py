"""The machine: what a processor announces and refuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

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
def test_a_processor_that_kills_it_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_BFLOAT16", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    with pytest.raises(UsageError, match=r"ONEDNN_MAX_CPU_ISA=AVX512_CORE in the environment, or train in float32"):
        environment.require_bfloat16()
