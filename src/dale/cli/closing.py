"""The end of a training: evaluation on the test set, the certificate, and the closing table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dale.errors import UsageError

if TYPE_CHECKING:
    from dale.constraints import Constraint
    from dale.data import Dataset
    from dale.perturbations import PerturbationSet
    from dale.training.runs import Run

LIMIT = 400  # a test set of this size is evaluated whole on a CPU by default; of a larger one, a part


def close_run(
    run: Run, data: Dataset, *, attacks: Sequence[str] | None, examples: int | None, progress: bool
) -> dict[str, Any]:
    """Evaluate and certify a run; returns the content of evaluation.json (nothing in processes that do not write)."""
    import torch

    from dale.evaluation import evaluate
    from dale.evaluation.team import Team, shared_by
    from dale.files import read_json, write_json
    from dale.training import distributed
    from dale.training.artefacts import write_artefacts
    from dale.training.certification import certify_run
    from dale.training.loggers import TensorBoard, log_gallery

    team = Team(distributed.rank(), distributed.world_size(), distributed.added)
    objective = run.objective
    assert objective.perturbations is not None
    on_gpu = next(run.model.parameters()).device.type == "cuda" and torch.cuda.is_available()
    if examples is None and not on_gpu:
        # a twentieth of the training set's size, so that evaluating costs less than an epoch of training
        examples = len(data.test) if len(data.test) <= LIMIT else max(LIMIT // 2, len(data.train) // 20)
    names = list(attacks) if attacks else ["fgsm", "pgd20x10" if len(data.test) <= LIMIT else "pgd20"]
    if team.size > 1 and distributed.is_main():  # what one process left behind the others would not know of
        (run.path / "evaluation.partial.safetensors").unlink(missing_ok=True)
    with shared_by(team):
        evaluate(
            run.model,
            data,
            objective.perturbations,
            names,
            examples=None if examples is None else min(examples, len(data.test)),
            rho=objective.rho,
            epsilons=_radii(objective.perturbations),
            out=run.path if distributed.is_main() else None,
            progress=progress and distributed.is_main(),
        )
    try:
        certificate = certify_run(run, data)
        stated = None if certificate is None else certificate.to_plain()
    except UsageError as error:  # a class without a held-out example, say: training is done all the same
        stated = {"holds": None, "statement": f"There is no certificate: {error}."}
    if not distributed.is_main():
        return {}
    plain: dict[str, Any] = read_json(run.path / "evaluation.json")
    if stated is not None:
        plain["certificate"] = stated
        write_json(run.path / "evaluation.json", plain)
    artefacts = write_artefacts(run, data, run.path)
    if artefacts is not None:
        board = TensorBoard(run.path)
        log_gallery(artefacts, board, run.summary["epochs"])
        board.finish(None)
    return plain


def _radii(perturbations: PerturbationSet) -> list[float] | None:
    """The radii of the curve of accuracy over epsilon, for sets that have one."""
    if not hasattr(perturbations, "epsilon"):
        return None
    return [share * perturbations.radius for share in (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)]


def closing_table(done: Sequence[tuple[Run, dict[str, Any] | None]]) -> str:
    """Set the runs side by side: accuracies, the nominal loss against its limit, multipliers, the certificate."""
    attacks = [a["name"] for _, plain in done if plain is not None for a in plain["attacks"][:8]]
    columns = list(dict.fromkeys(attacks))
    head = ["row", "clean", *columns, "held-out loss", "constraint", "nu"]
    rows = [[*_cells(run, plain, columns)] for run, plain in done]
    widths = [max(len(line[i]) for line in (head, *rows)) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in (head, *rows)]
    table = "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
    notes = [""]
    first, plain = done[0]
    if plain is not None:
        shown = plain["clean"]["n"]
        notes.append(f"Accuracies on {shown} test images; under attack they are upper bounds on the true ones.")
        if "certificate" in plain:
            notes.append(plain["certificate"]["statement"])
        notes += [f"Warning: {alarm['message']}" for alarm in plain["alarms"] if not alarm["passed"]]
    if first.summary["feasible"] is False:
        notes.append(
            "The constraint is NOT met on held-out data: of the checkpoints within a tenth of the smallest violation "
            "the most robust was kept."
        )
    return "\n".join([table, *notes])


def _limits(constraint: Constraint, means: Sequence[float | None], errors: Sequence[float | None]) -> str:
    """The limits of a constraint, and the groups that are above theirs by more than a standard error."""
    name = "error" if constraint.on_accuracy else "loss"
    limits = constraint.limits(len(means)).tolist()
    each = f"{limits[0]:.3g}" if len(set(limits)) == 1 else f"{min(limits):.3g}..{max(limits):.3g}"
    text = f"{name} <= {each}" + (f" by {constraint.by}" if constraint.by != "all" else "")
    above = [
        f"{constraint.by} {group} {mean:.3g}" + (f" > {limit:.3g}" if len(set(limits)) > 1 else "")
        for group, (mean, error, limit) in enumerate(zip(means, errors, limits, strict=True))
        if mean is not None and mean - (error or 0.0) > limit
    ]
    return f"{text} ({', '.join(above)})" if constraint.by != "all" and above else text


def _cells(run: Run, plain: dict[str, Any] | None, columns: Sequence[str]) -> list[str]:
    held = run.summary["validation"]
    accuracies = {} if plain is None else {a["name"]: a["accuracy"]["accuracy"] for a in plain["attacks"]}
    clean = held["clean_accuracy"] if plain is None else plain["clean"]["accuracy"]
    limits, multipliers = [], []
    for constraint, measured, values in zip(
        run.objective.constraints, held["constraints"], run.summary["multipliers"], strict=True
    ):
        limits.append(_limits(constraint, measured["measure"], measured["standard_error"]))
        multipliers.append(f"{min(values):.2f}" if len(values) == 1 else f"{min(values):.2f}..{max(values):.2f}")
    met = {None: "none", True: "met: ", False: "NOT met: "}[run.summary["feasible"]]
    return [
        run.objective.name,
        f"{clean:.1%}",
        *(f"{accuracies[c]:.1%}" if c in accuracies else "-" for c in columns),
        f"{held['nominal_loss']:.3f}",
        met + ", ".join(limits),
        ", ".join(multipliers) or "-",
    ]
