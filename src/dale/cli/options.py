"""Options of `dale train` and how they become a configuration."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dale.errors import UsageError, unknown

if TYPE_CHECKING:
    from dale.training.config import RunConfig

# Options of the rows: name -> (what to show for its value, what it means). A row refuses those it does not take.
ROW_OPTIONS: dict[str, tuple[str, str]] = {
    "rho": ("LOSS", "limit on the nominal loss; one number, or [a, b, ...] with --by class"),
    "min_accuracy": ("SHARE", "promise this clean accuracy, such as 0.85, in place of rho's default; with --rho both"),
    "by": ("all|class|group", "one multiplier for all, or one per class or group"),
    "loss": ("kl|cross-entropy", "DALE's robust loss, or a loss of yours as package.module:Name"),
    "steps": ("N", "steps of the training attack"),
    "step_size": ("SIZE", "size of a step (default: a quarter of the set's radius)"),
    "noise_scale": ("C", "scale of the Langevin noise"),
    "temperature": ("T", "temperature instead of the noise scale, C = sqrt(2 * step size * T)"),
    "start": ("gaussian|away", "start of chains that climb KL: beside the image at random, or away from the label"),
    "sampler": ("SAMPLER", "another sampler: a name, {type: Chain, steps: 5, ...} or package.module:Name"),
    "dual_step_size": ("ETA", "step size of dual ascent (default: 10 over the number of ascents)"),
    "dual_initial": ("NU", "multiplier at the start"),
    "dual_frequency": ("step|epoch", "when the multiplier moves"),
    "dual_upper": ("NU", "upper bound of the multiplier"),
    "tighten": ("BOOL", "tighten the limit by the gap between held-out and training loss"),
    "batchnorm": ("joint|separate", "clean and perturbed images as one batch or two"),
    "beta": ("BETA", "weight of TRADES's divergence; share of CVaR"),
    "weight": ("W", "weight of the pairing (clp, alp) or of MART's divergence"),
    "nu": ("NU", "fixed multiplier of dale-fixed"),
    "gamma": ("GAMMA", "smoothness of lambda* (dale-optimal)"),
    "norm_budget": ("BUDGET", "norm budget of lambda* instead of gamma"),
    "candidates": ("chain|uniform", "what lambda* weighs (dale-optimal): last states of the chain, or uniform draws"),
    "num_samples": ("K", "perturbations per example (dale-optimal, worst-of-k, cvar, term)"),
    "t": ("T", "tilt (term)"),
    "robust_loss": ("LOSS", "robust loss of augment, fgsm and pgd"),
    "nominal_loss": ("LOSS", "nominal loss of erm"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that make up a configuration."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="start from this configuration, of which parts may be left out, or from that of a stored model, zoo:NAME; "
        "options go on top",
    )
    parser.add_argument("--trust", action="store_true", help="honour import paths inside configuration files")

    data = parser.add_argument_group("data")
    data.add_argument("--dataset", metavar="NAME|PATH", help="a name (`dale list datasets`), an .npz or a folder")
    data.add_argument("--data-dir", metavar="DIR", help="where data files lie (default: $DALE_DATA or a user cache)")
    for part in ("train", "validation", "certification", "test"):
        data.add_argument(f"--{part}-size", metavar="N", type=int, help=f"size of the {part} split")

    model = parser.add_argument_group("model")
    model.add_argument("--model", metavar="NAME", help="a name (`dale list models`) or package.module:Name")
    model.add_argument("--activation", metavar="NAME", help="activation function, relu or silu")
    model.add_argument("--init", metavar="FILE", help="start from these weights: a .safetensors file, or zoo:NAME")

    row = parser.add_argument_group("algorithm")
    row.add_argument("--algorithm", metavar="NAME", help="a row (`dale list algorithms`) or package.module:function")
    row.add_argument("--set", metavar="SET", help="perturbation set: linf, l2, l1, rotation, ..., or {type: ..., ...}")
    row.add_argument("--epsilon", metavar="RADIUS", help="radius of the set, such as 0.25 or 8/255")
    for name, (metavar, text) in ROW_OPTIONS.items():
        row.add_argument(f"--{name.replace('_', '-')}", metavar=metavar, help=text)
    row.add_argument("--option", metavar="NAME=VALUE", action="append", default=[], help="an option of your own row")

    train = parser.add_argument_group("training")
    train.add_argument("--epochs", metavar="N", type=int, help="passes over the training data")
    train.add_argument("--batch-size", metavar="N", type=int, help="examples per step")
    train.add_argument("--accumulate", metavar="N", type=int, help="work through a batch in N parts, to save memory")
    train.add_argument(
        "--sync-batchnorm", action="store_true", default=None, help="under torchrun: BatchNorm over all processes"
    )
    train.add_argument("--optimiser", metavar="NAME", help="sgd, adamw, adadelta, or {type: SGD, momentum: 0.9, ...}")
    train.add_argument("--lr", metavar="RATE", help="peak learning rate")
    train.add_argument("--weight-decay", metavar="W", help="weight decay")
    train.add_argument("--schedule", metavar="NAME", help="constant, piecewise, cosine, onecycle, or {type: ..., ...}")
    train.add_argument("--ema", metavar="DECAY", help="decay of the average of the weights; 0 for none")
    train.add_argument("--awp", metavar="GAMMA", help="adversarial weight perturbation, such as 0.005; 0 for none")
    train.add_argument("--augmentation", metavar="LIST", help="such as [RandomCrop, RandomFlip]; [] for none")
    train.add_argument("--precision", metavar="NAME", help="float32 or bfloat16")
    train.add_argument("--seed", metavar="N", type=int, help="seed of the run")
    train.add_argument(
        "--deterministic", action="store_true", default=None, help="the same bits on a GPU and with --fast on too"
    )
    train.add_argument("--validate-every", metavar="N", type=int, help="epochs between two validations")
    train.add_argument("--validation-steps", metavar="N", type=int, help="PGD steps of a validation")
    train.add_argument("--validation-examples", metavar="N", type=int, help="held-out images attacked per validation")


def parse_value(text: str, where: str) -> Any:
    """Read an option's text: a number, a fraction such as 8/255, a list, a mapping, or a word."""
    from dale.components import parse_yaml

    top, slash, bottom = text.partition("/")
    if slash:
        try:
            return float(top) / float(bottom)
        except (ValueError, ZeroDivisionError):
            pass
    try:
        return (
            float(text) if any(c.isdigit() for c in text) and ":" not in text and "e" in text.lower() else _yaml(text)
        )
    except ValueError:
        return parse_yaml(text, where)


def _yaml(text: str) -> Any:
    from dale.components import parse_yaml

    # `a.b:C` would be text to YAML as well, but `{type: a.b:C}` in a flow mapping is read as intended
    return parse_yaml(text, "option")


def number(text: str | None, where: str) -> float | None:
    """Read a number or a fraction."""
    if text is None:
        return None
    value = parse_value(text, where)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise UsageError(f"{where}: expected a number, got {text!r}")
    return float(value)


def build_config(args: argparse.Namespace) -> RunConfig:
    """Return the configuration that the options ask for."""
    from dataclasses import replace

    from dale.training.config import RunConfig
    from dale.training.recipes import default_config

    if args.config is not None:
        text = _configuration(args.config)
        config = RunConfig.from_yaml(text, where=args.config, trust=args.trust, recipe=default_config)
        if args.dataset is not None:
            config = replace(config, data=replace(config.data, dataset=args.dataset))
    else:
        config = default_config(args.dataset or "digits")
    sizes = {f"{part}_size": getattr(args, f"{part}_size") for part in ("train", "validation", "certification", "test")}
    config = replace(config, data=replace(config.data, **_given(sizes)))
    model = _given({"name": args.model, "activation": args.activation, "init": args.init})
    config = replace(config, model=replace(config.model, **model))
    return _with_training(_with_objective(config, args), args)


def _configuration(where: str) -> str:
    """The text of a configuration: a file's, or that of a stored model."""
    from pathlib import Path

    from dale.files import read_text
    from dale.models.stored import PREFIX, find

    if where.startswith(PREFIX):
        return find(where).config
    if not Path(where).is_file():
        raise UsageError(f"--config: there is no file {where!r}")
    return read_text(Path(where))


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _with_objective(config: RunConfig, args: argparse.Namespace) -> RunConfig:
    """Apply the options of the algorithm."""
    from dataclasses import replace

    from dale.algorithms import ROWS, find_row, options_of
    from dale.algorithms.options import overlay
    from dale.training.config import Algorithm
    from dale.training.recipes import with_algorithm

    if args.algorithm is not None:
        config = with_algorithm(config, args.algorithm)
    options = {
        name: parse_value(value, f"--{name.replace('_', '-')}")
        for name in ROW_OPTIONS
        if (value := getattr(args, name)) is not None
    }
    for pair in args.option:
        name, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"--option: expected NAME=VALUE, got {pair!r}")
        options[name.replace("-", "_")] = parse_value(value, f"--option {name}")
    objective = config.objective
    if not isinstance(objective, Algorithm):
        if options or args.set or args.epsilon:
            raise UsageError("the configuration spells its objective out; choose a row with --algorithm to change it")
        return config
    valid = options_of(find_row(objective.name))
    for name in options:
        if name not in valid:
            written = [f"--{option.replace('_', '-')}" for option in (name, *valid)]
            others = [row for row, build in ROWS.items() if name in options_of(build)]
            kind = f"option of algorithm {objective.name!r}"
            if others:  # which says more than the nearest name
                choices = ", ".join(sorted(written[1:]))
                raise UsageError(f"unknown {kind} {written[0]!r}, which {', '.join(others)} have. Valid: {choices}")
            raise unknown(kind, written[0], written[1:])
    perturbations = _perturbations(objective.perturbations, args)
    merged = overlay(objective.options, options)
    return replace(config, objective=replace(objective, perturbations=perturbations, options=merged))


def _perturbations(current: Any, args: argparse.Namespace) -> Any:
    from dale.components import find, from_plain, to_plain
    from dale.perturbations import PerturbationSet

    epsilon = number(args.epsilon, "--epsilon")
    if args.set is None and epsilon is None:
        return current
    plain = to_plain(current) if args.set is None else parse_value(args.set, "--set")
    if isinstance(plain, str):
        plain = {"type": plain}
    if not isinstance(plain, dict) or "type" not in plain:
        raise UsageError(f"--set: expected a name or a mapping with `type`, got {args.set!r}")
    cls = find(PerturbationSet, plain["type"])  # type: ignore[type-abstract]  # looked up, never instantiated
    fields = [field.name for field in dataclasses.fields(cls) if field.init] if dataclasses.is_dataclass(cls) else []
    if epsilon is not None:
        if "epsilon" not in fields:
            raise UsageError(f"--epsilon: {plain['type']} has no radius; its options are {', '.join(fields) or 'none'}")
        if cls.__name__ == "Linf" and epsilon > 1.0:
            meant = f"; did you mean {epsilon:g}/255?" if epsilon <= 255.0 else ""
            raise UsageError(f"--epsilon: a pixel has the range [0, 1], got {args.epsilon}{meant}")
        plain["epsilon"] = epsilon
    elif "epsilon" in fields and "epsilon" not in plain:
        raise UsageError(f"--set {plain['type']} needs a radius: give --epsilon")
    return from_plain(plain, PerturbationSet, where="--set", trust=True)


def _with_training(config: RunConfig, args: argparse.Namespace) -> RunConfig:
    """Apply the options of training."""
    from dataclasses import replace

    from dale.components import from_plain
    from dale.data import Augmentation
    from dale.training.averaging import Averaging
    from dale.training.optimisers import Optimiser, Schedule
    from dale.training.weights import WeightPerturbation

    training = config.training
    optimiser = training.optimiser
    if args.optimiser is not None:
        optimiser = from_plain(parse_value(args.optimiser, "--optimiser"), Optimiser, where="--optimiser", trust=True)
    rates = {"learning_rate": number(args.lr, "--lr"), "weight_decay": number(args.weight_decay, "--weight-decay")}
    changes: dict[str, Any] = {"optimiser": replace(optimiser, **_given(rates))}
    if args.schedule is not None:
        changes["schedule"] = from_plain(
            parse_value(args.schedule, "--schedule"), Schedule, where="--schedule", trust=True
        )
    if args.augmentation is not None:
        changes["augmentation"] = from_plain(
            parse_value(args.augmentation, "--augmentation"),
            tuple[Augmentation, ...],
            where="--augmentation",
            trust=True,
        )
    decay = number(args.ema, "--ema")
    if decay is not None:
        changes["averaging"] = Averaging(decay=decay) if decay else None
    gamma = number(args.awp, "--awp")
    if gamma is not None:
        changes["weight_perturbation"] = WeightPerturbation(gamma=gamma) if gamma else None
    validation = {"every": args.validate_every, "steps": args.validation_steps, "examples": args.validation_examples}
    changes["validation"] = replace(training.validation, **_given(validation))
    names = ("epochs", "batch_size", "accumulate", "sync_batchnorm", "precision", "seed", "deterministic")
    changes |= _given({name: getattr(args, name) for name in names})
    return replace(config, training=replace(training, **changes))
