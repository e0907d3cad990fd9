"""Files from strangers: every input that once failed, a few fresh ones, and in `make verify` thousands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import fuzzer

PAST = sorted(path for path in fuzzer.CORPUS.rglob("*") if path.is_file())


def _fuzz(*arguments: str, timeout: float) -> list[dict[str, object]]:
    """Run the fuzzer in a process of its own, for it bounds its memory."""
    command = [sys.executable, str(Path(fuzzer.__file__)), "--no-corpus", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode in (0, 1), done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("name", list(fuzzer.TARGETS))
def test_every_reader_takes_what_the_mutations_start_from(name, tmp_path):
    """A fuzzer whose inputs are all refused at the door would find nothing."""
    target = fuzzer.TARGETS[name]()
    for data in target.untouched():
        assert fuzzer.attempt(target, tmp_path / target.file, data) == ("read", None)


@pytest.mark.parametrize("path", PAST, ids=[f"{path.parent.name}-{path.name}" for path in PAST])
def test_inputs_that_once_failed(path, tmp_path):
    target = fuzzer.TARGETS[path.parent.name]()
    outcome, error = fuzzer.attempt(target, tmp_path / target.file, path.read_bytes())
    assert outcome in ("read", "refused"), repr(error)


def test_the_fuzzer_sees_what_is_wrong(tmp_path, monkeypatch):
    """An error of another kind, an error without a word, a hang and a hunger for memory are all failures."""

    def crash(path: Path) -> None:
        raise ZeroDivisionError

    def mumble(path: Path) -> None:
        from dale.errors import DataError

        raise DataError("")

    def hang(path: Path) -> None:
        while True:
            pass

    monkeypatch.setattr(fuzzer, "LIMIT", 0.2)
    for read in (crash, mumble, hang):
        monkeypatch.setitem(fuzzer.TARGETS, "bad", lambda read=read: fuzzer.Target(read, [([b"x"], bytes)]))
        assert fuzzer.fuzz("bad", 1, keep=None)["failed"] == 1
    code = (
        f"import sys; sys.path.insert(0, {str(Path(fuzzer.__file__).parent)!r}); import fuzzer\n"
        "def eat(path): bytearray(8 * 2**30)\n"
        "fuzzer.TARGETS['bad'] = lambda: fuzzer.Target(eat, [([b'x'], bytes)])\n"
        "fuzzer.bound_memory(); print(fuzzer.fuzz('bad', 1, keep=None)['failures'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "MemoryError" in done.stdout


def test_a_few_fresh_inputs():
    for result in _fuzz("--count", "200", "--seed", "1", timeout=240):
        assert result["failed"] == 0, result


@pytest.mark.verify
@pytest.mark.timeout(1800)
def test_many_fresh_inputs():
    for result in _fuzz("--count", "5000", "--seed", "2", timeout=1800):
        assert result["failed"] == 0, result
