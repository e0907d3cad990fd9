"""Options of rows that go together or stand for one another, whichever row takes them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec

from dale.errors import require
from dale.objectives import Objective

Options = ParamSpec("Options")
# what rows make a chain of, and any sampler, where none is given
CHAIN = ("steps", "step_size", "noise_scale", "temperature", "start")
SAMPLING = (*CHAIN, "num_samples", "candidates")


def idle(options: Mapping[str, Any]) -> list[str]:
    """Those options of a row that others of them leave nothing to do."""
    names: tuple[str, ...] = ()
    if options.get("sampler") is not None:
        names = SAMPLING
    elif options.get("candidates") == "uniform":
        names = CHAIN
    return [name for name in names if options.get(name) is not None]


def one_sampler(row: Callable[Options, Objective]) -> Callable[Options, Objective]:
    """Refuse options of a row's own sampler beside a sampler that is given, and of a chain where there is none."""

    @functools.wraps(row)
    def build(*args: Options.args, **options: Options.kwargs) -> Objective:
        names = ", ".join(idle(options))
        other = "candidates='uniform'" if options.get("sampler") is None else "a sampler that is given"
        require(not names, f"{names} would do nothing beside {other}: leave one or the other out")
        return row(*args, **options)

    return build


# options that say the same in other words: where one is given, those of a recipe make room
_INSTEAD = {
    "rho": ("min_accuracy",),
    "min_accuracy": ("rho",),
    "temperature": ("noise_scale",),
    "noise_scale": ("temperature",),
    "gamma": ("norm_budget",),
    "norm_budget": ("gamma",),
}


def overlay(usual: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a recipe with others on top, which also replace what they are given instead of."""
    replaced = {name for one in given for name in _INSTEAD.get(one, ())}
    merged = {name: value for name, value in usual.items() if name not in replaced} | dict(given)
    done = {*idle(merged)} - given.keys()
    return {name: value for name, value in merged.items() if name not in done}
