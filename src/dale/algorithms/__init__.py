"""The named algorithms: each a small function that returns one `Objective`. Adding an algorithm is adding a row.

| name         | sampler climbs          | robust loss                       | nominal loss | nu              |
|--------------|-------------------------|-----------------------------------|--------------|-----------------|
| erm          | no sampler              | none                              | CE(x)        | 1               |
| augment      | fixed noise             | CE(x')                            | none         | 0               |
| fgsm         | CE, one step of epsilon | CE(x')                            | none         | 0               |
| pgd          | CE                      | CE(x')                            | none         | 0               |
| clp          | CE                      | logit pairing                     | CE(x)        | 1               |
| alp          | CE                      | CE(x') + logit pairing            | none         | 0               |
| trades       | KL                      | beta * KL                         | CE(x)        | 1               |
| mart         | CE                      | BCE(x') + weight * KL (1 - p_y)   | none         | 0               |
| dale         | KL or CE, Langevin      | KL or CE(x')                      | CE(x)        | dual, limit rho |
| dale-fixed   | as dale                 | as dale                           | CE(x)        | fixed           |
| dale-optimal | K draws                 | lambda*-weighted KL or CE(x')     | CE(x)        | dual, limit rho |
| worst-of-k   | K draws                 | largest of K CE(x')               | none         | 0               |
| cvar         | K draws                 | mean of the worst share beta      | none         | 0               |
| term         | K draws                 | tilted mean of K CE(x')           | none         | 0               |

P-CON's robust objective is the loss itself; with KL as the robust loss a row optimises a surrogate of it. CLP pairs
clean with adversarial logits, as the paper's numbers do; the original pairs two clean images.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from dale.algorithms.baselines import alp, augment, clp, cvar, erm, fgsm, mart, pgd, term, trades, worst_of_k
from dale.algorithms.constrained import dale, dale_fixed, dale_optimal
from dale.components import import_object, is_import_path
from dale.errors import UsageError, unknown
from dale.objectives import Objective
from dale.perturbations import PerturbationSet

Row = Callable[..., Objective]

ROWS: dict[str, Row] = {
    row.__name__.replace("_", "-"): row
    for row in (
        erm,
        augment,
        fgsm,
        pgd,
        clp,
        alp,
        trades,
        mart,
        dale,
        dale_fixed,
        dale_optimal,
        worst_of_k,
        cvar,
        term,
    )
}


def find_row(name: str) -> Row:
    """Return the row of a name, or a function of the user's by its import path."""
    if is_import_path(name):
        row: Row = import_object(name)
        return row
    folded = name.replace("_", "-").lower()
    if folded not in ROWS:
        raise unknown("algorithm", name, ROWS)
    return ROWS[folded]


def options_of(row: Row) -> dict[str, Any]:
    """Return the options that a row takes, with their types."""
    hints = inspect.get_annotations(row, eval_str=True)
    return {
        name: hints.get(name, Any)
        for name, parameter in inspect.signature(row).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def build(name: str, perturbations: PerturbationSet | None, /, **options: Any) -> Objective:
    """Return the objective of a named row for a set, refusing options that the row does not take."""
    row = find_row(name)
    valid = options_of(row)
    for option in options:
        if option not in valid:
            raise unknown(f"option of algorithm {name!r}", option, valid)
    objective = row(perturbations, **options)
    if not isinstance(objective, Objective):
        raise UsageError(f"{name!r} returned {type(objective).__name__}; a row returns a dale.Objective")
    return objective
