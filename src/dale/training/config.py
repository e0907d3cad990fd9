"""The configuration of a run: one component tree, written to `config.yaml` and read back equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from dale import algorithms
from dale.components import (
    Component,
    dump_yaml,
    from_plain,
    may_name_code,
    parse_yaml,
    refuse_code,
    require_component,
    to_plain,
)
from dale.data import Augmentation, Dataset, load_dataset
from dale.data.load import known_name
from dale.errors import UsageError, require, require_choice, require_whole
from dale.objectives import Objective
from dale.perturbations import PerturbationSet
from dale.training.averaging import Averaging
from dale.training.optimisers import AdamW, OneCycle, Optimiser, Schedule
from dale.training.validation import Validation
from dale.training.weights import WeightPerturbation

FORMAT = 1  # of config files; raised when older ones can no longer be read
PATHS = (("data", "dataset"), ("model", "init"))  # where a text is a path, and never code to import


@dataclass(frozen=True, kw_only=True)
class DataConfig(Component):
    """Which data: a name, an .npz or a folder; where files live; sizes of the splits; the seed that deals them."""

    dataset: str = "digits"
    train_size: int | None = None
    validation_size: int | None = None
    certification_size: int | None = None
    test_size: int | None = None
    seed: int = 0

    def load(self, data_dir: str | None = None, near: Path | None = None) -> Dataset:
        """Load the data set; a path that is not there is looked for beside `near`, a run folder, and above it."""
        return load_dataset(
            self._found(near),
            data_dir=data_dir,
            seed=self.seed,
            train_size=self.train_size,
            validation_size=self.validation_size,
            certification_size=self.certification_size,
            test_size=self.test_size,
        )

    def _found(self, near: Path | None) -> str:
        if near is None or known_name(self.dataset) is not None or Path(self.dataset).expanduser().exists():
            return self.dataset
        places = (parent / self.dataset for parent in near.resolve().parents)
        return str(next((place for place in places if place.exists()), self.dataset))


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Component):
    """Which model: a name or an import path, its activation, and the weights to start from."""

    name: str = may_name_code(default="convnet")
    activation: str = "relu"
    init: str | None = None


@dataclass(frozen=True, kw_only=True)
class Algorithm(Component):
    """A row by its name (or import path), for a set, with the row's own options as plain values."""

    name: str = may_name_code(default="dale")
    perturbations: PerturbationSet | None = None
    options: dict[str, Any] = may_name_code(default_factory=dict)

    def __post_init__(self) -> None:
        # as a file has them: components, tuples and numpy's numbers come back equal
        object.__setattr__(self, "options", to_plain(self.options))

    def build(self) -> Objective:
        """Return the objective."""
        types = algorithms.options_of(algorithms.find_row(self.name))
        values = {
            # what is not an option of the row is handed on as it is: `algorithms.build` names the nearest valid one
            name: from_plain(value, types[name], where=f"--{name.replace('_', '-')}", trust=True)
            if name in types
            else value
            for name, value in self.options.items()
        }
        return algorithms.build(self.name, self.perturbations, **values)


@dataclass(frozen=True, kw_only=True)
class Training(Component):
    """How to train: everything but data, model and objective.

    `deterministic` promises the same bits on a GPU as well, and with the fast path on a CPU, which otherwise tries out
    what pays there; on a CPU's plain path they are promised anyway. `accumulate` works through a batch in so many parts
    where the whole does not fit: the same gradient, and one dual ascent, for models without BatchNorm.
    `sync_batchnorm`: under torchrun, BatchNorm sees the batch of all processes.
    """

    epochs: int = 40
    batch_size: int = 128
    optimiser: Optimiser = AdamW()
    schedule: Schedule = OneCycle()
    averaging: Averaging | None = Averaging()
    weight_perturbation: WeightPerturbation | None = None
    augmentation: tuple[Augmentation, ...] = ()
    validation: Validation = Validation()
    precision: Literal["float32", "bfloat16"] = "float32"
    seed: int = 0
    deterministic: bool = False
    accumulate: int = 1
    sync_batchnorm: bool = False

    def __post_init__(self) -> None:
        require_whole(self, epochs=self.epochs, batch_size=self.batch_size, accumulate=self.accumulate, seed=self.seed)
        for name, kind in (("optimiser", Optimiser), ("schedule", Schedule), ("validation", Validation)):
            require(getattr(self, name) is not None, f"Training: {name} must be of kind {kind.__name__}, got None")
            require_component(self, kind, **{name: getattr(self, name)})
        require_component(self, Averaging, averaging=self.averaging)
        require_component(self, WeightPerturbation, weight_perturbation=self.weight_perturbation)
        several = isinstance(self.augmentation, (tuple, list))
        require(several, f"Training: augmentation must be several of kind Augmentation, got {self.augmentation!r}")
        object.__setattr__(self, "augmentation", tuple(self.augmentation))
        for number, augmentation in enumerate(self.augmentation):
            require_component(self, Augmentation, **{f"augmentation[{number}]": augmentation})
        require(self.epochs >= 1, f"Training: epochs must be at least 1, got {self.epochs!r}")
        require(self.batch_size >= 1, f"Training: batch_size must be at least 1, got {self.batch_size!r}")
        require(
            1 <= self.accumulate <= self.batch_size,
            f"Training: accumulate must lie between 1 and the batch size {self.batch_size}, got {self.accumulate!r}",
        )
        require_choice(self, ("float32", "bfloat16"), precision=self.precision)
        require(0 <= self.seed < 2**63, f"Training: seed must be a whole number from 0 to 2^63 - 1, got {self.seed!r}")

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the forward and backward passes; losses are float32 always."""
        return torch.bfloat16 if self.precision == "bfloat16" else torch.float32


@dataclass(frozen=True, kw_only=True)
class RunConfig(Component):
    """A whole run: data, model, objective (a named row, or one spelled out) and training."""

    format: int = FORMAT
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    objective: Algorithm | Objective = Algorithm()
    training: Training = Training()

    def build_objective(self) -> Objective:
        """Return the objective."""
        return self.objective.build() if isinstance(self.objective, Algorithm) else self.objective

    def to_yaml(self) -> str:
        """Write the configuration."""
        return dump_yaml(self)

    @staticmethod
    def from_yaml(
        text: str, *, where: str = "config", trust: bool = False, recipe: Callable[[str], RunConfig] | None = None
    ) -> RunConfig:
        """Read a configuration; code that it names is refused unless trusted.

        What a file leaves out is the default, or with `recipe` that of the data set it names.
        """
        plain = parse_yaml(text, where)
        if not isinstance(plain, Mapping):
            raise UsageError(f"{where}: expected the configuration of a run, got {plain!r:.80}")
        version = plain.get("format", FORMAT)
        if version != FORMAT:
            raise UsageError(f"{where}: configuration format {version!r}; this version of dale reads format {FORMAT}")
        if not trust:
            refuse_code(plain, where, PATHS)
        if recipe is not None:
            plain = _filled(plain, recipe)
        config = from_plain(plain, RunConfig, where=where, trust=trust)
        assert isinstance(config, RunConfig)
        return config


def _filled(plain: Mapping[str, Any], recipe: Callable[[str], RunConfig]) -> dict[str, Any]:
    """Put the recipe's values where a file has none; an objective is taken whole."""
    data = plain.get("data")
    dataset = data.get("dataset") if isinstance(data, Mapping) else None
    filled: dict[str, Any] = to_plain(recipe(dataset if isinstance(dataset, str) else DataConfig.dataset))
    for name, value in plain.items():
        partly = name in ("data", "model", "training") and isinstance(value, Mapping)
        filled[name] = {**filled[name], **value} if partly else value
    return filled


def changed(recorded: Any, given: Any) -> str | None:
    """The first value that keeps a run from going on: in which its configuration, as plain values, is another now."""
    return _difference(_what_counts(recorded), _what_counts(given))


def _what_counts(plain: Any) -> Any:
    """A configuration less what does not matter on resuming.

    That is where data lie, for what they are is looked at by itself, and the weights that the model once started from.
    """
    if (
        not isinstance(plain, dict)
        or not isinstance(plain.get("data"), dict)
        or not isinstance(plain.get("model"), dict)
    ):
        return plain
    data, model = dict(plain["data"]), {k: v for k, v in plain["model"].items() if k != "init"}
    data["dataset"] = Path(str(data.get("dataset"))).name
    return {**plain, "data": data, "model": model}


def _difference(recorded: Any, given: Any, where: str = "") -> str | None:
    """The first value in which two configurations differ; what only the newer one knows is no difference."""
    if isinstance(recorded, dict) and isinstance(given, dict):
        # options are not fields with defaults: one that is only given is a difference
        names = dict.fromkeys([*recorded, *given]) if where.endswith("options") else recorded
        pairs = [(f"{where}.{k}".lstrip("."), recorded.get(k), given.get(k)) for k in names]
        return next((found for name, a, b in pairs if (found := _difference(a, b, name))), None)
    if isinstance(recorded, list) and isinstance(given, list) and len(recorded) == len(given):
        parts = [_difference(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(recorded, given, strict=True))]
        return next(filter(None, parts), None)
    same = str(recorded).lower() == str(given).lower() if where.endswith(".type") else recorded == given
    return None if same else f"{where} was {recorded!r:.80}, now {given!r:.80}"
