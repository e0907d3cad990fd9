"""Many runs through the machinery of sweeps: so many processes at a time; what has a result is skipped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dale.experiments import Launch, Place, SweepRun, TrainOptions
from dale.reproduction.recipes import Spec

_NO_OPTIONS = TrainOptions(frozenset(), frozenset(), frozenset())


@dataclass(frozen=True)
class Slot(Place):
    """Where a run of a table lies, and its result: with a result it is finished, wherever that was made."""

    spec: Spec
    result: Path

    @property
    def finished(self) -> bool:
        """Whether the result is on file."""
        return self.result.is_file()


@dataclass(frozen=True)
class WorkerLaunch(Launch):
    """Starts `dale reproduce ... --only RUN`; compiled kernels are kept in one folder for all of them."""

    common: Sequence[str] = ()
    cache: Path | None = None
    kinds: TrainOptions = field(default=_NO_OPTIONS)

    def words(self, place: Place) -> list[str]:
        """The words after `dale`."""
        return ["reproduce", *self.common, f"--only={place.run.name}"]

    def environment(self) -> dict[str, str]:
        """The environment of a run."""
        own = super().environment()
        if self.cache is not None:
            own.setdefault("TORCHINDUCTOR_CACHE_DIR", str(self.cache.resolve()))
        if self.threads:  # each would start one compiler per core otherwise
            own.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(self.threads))
        return own


def slots_of(specs: Iterable[Spec], runs: Path, results: Path) -> list[Slot]:
    """A place for every run, each run once."""
    found: dict[str, Slot] = {}
    for spec in specs:
        name = spec.path.removesuffix(".json")
        varied = {"dataset": spec.dataset, "model": spec.model, "row": spec.row, "seed": spec.seed}
        found.setdefault(name, Slot(runs, SweepRun(name, varied, {}), spec, results / spec.path))
    return list(found.values())


def outdated(slots: Sequence[Slot]) -> list[Slot]:
    """The finished ones whose result was made by another recipe than today's."""
    from dale.reproduction.results import is_current, read_result

    return [slot for slot in slots if slot.finished and not is_current(read_result(slot.result), slot.spec)]
