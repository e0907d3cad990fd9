"""Selection is P-CON itself: by hand, and against brute force over everything ever seen."""

from __future__ import annotations

import json

from hypothesis import example, given, settings
from hypothesis import strategies as st

from dale.training.selection import Candidate, Selection


def _choose(*candidates: tuple[float, float]) -> int | None:
    """The epoch chosen of (score, violation) pairs, numbered from 1."""
    selection = Selection()
    for epoch, (score, violation) in enumerate(candidates, 1):
        selection.add(Candidate(epoch, score, violation))
    return None if selection.best is None else selection.best.epoch


def test_among_feasible_ones_the_most_robust() -> None:
    assert _choose((0.3, -0.1), (0.5, 0.0), (0.4, -0.5), (0.9, 0.01)) == 2


def test_exactly_at_its_limit_is_feasible() -> None:
    assert _choose((0.3, 0.0), (0.9, 1e-12)) == 1


def test_how_far_below_its_limit_a_feasible_one_lies_does_not_matter() -> None:
    assert _choose((0.5, -9.0), (0.6, -0.001)) == 2


def test_none_feasible_the_most_robust_within_a_tenth_of_the_smallest_violation() -> None:
    assert _choose((0.3, 1.0), (0.5, 1.1), (0.9, 1.2)) == 2
    assert _choose((0.9, 1.2), (0.5, 1.1), (0.3, 1.0)) == 2
    assert _choose((0.3, 1.0), (0.2, 1.05)) == 1


def test_the_first_feasible_one_ends_all_others() -> None:
    selection = Selection()
    for epoch, (score, violation) in enumerate([(0.9, 0.5), (0.8, 0.4), (0.1, -0.1)], 1):
        selection.add(Candidate(epoch, score, violation))
    assert selection.best == Candidate(3, 0.1, -0.1)


def test_ties_go_to_the_smaller_violation_then_to_the_later() -> None:
    assert _choose((0.5, -0.1), (0.5, -0.2)) == 2
    assert _choose((0.5, 1.0), (0.5, 1.05)) == 1
    assert _choose((0.5, 1.0), (0.5, 1.0)) == 2


def test_nothing_is_chosen_of_nothing() -> None:
    assert Selection().best is None


def _brute_force(seen: list[Candidate]) -> Candidate:
    """Section 6 of the method, over everything ever seen."""
    pool = [c for c in seen if c.violation <= 0.0]
    if not pool:
        smallest = min(c.violation for c in seen)
        pool = [c for c in seen if c.violation <= 1.1 * smallest]
    most = max(c.score for c in pool)
    pool = [c for c in pool if c.score == most]
    least = min(max(0.0, c.violation) for c in pool)
    return [c for c in pool if max(0.0, c.violation) == least][-1]


# few values, so that ties and near ties are common
_SCORES = st.sampled_from([0.0, 0.25, 0.5, 0.75])
_VIOLATIONS = st.one_of(st.sampled_from([-1.0, 0.0, 0.1, 0.105, 0.11, 0.12, 1.0]), st.floats(-0.2, 0.5))


@given(st.lists(st.tuples(_SCORES, _VIOLATIONS), min_size=1, max_size=12))
@example([(0.5, 0.1), (0.5, 0.105)])
@settings(max_examples=500, deadline=None)
def test_pruning_never_removes_what_brute_force_would_choose(values: list[tuple[float, float]]) -> None:
    selection, seen = Selection(), []
    for epoch, (score, violation) in enumerate(values, 1):
        candidate = Candidate(epoch, score, violation)
        seen.append(candidate)
        gone = selection.add(candidate)
        assert gone.isdisjoint(selection.candidates)
        assert selection.best == _brute_force(seen)


def test_dominated_ones_are_let_go_of() -> None:
    selection = Selection()
    assert selection.add(Candidate(1, 0.5, 0.3)) == set()
    assert selection.add(Candidate(2, 0.4, 0.2)) == set()
    assert selection.add(Candidate(3, 0.5, 0.2)) == {1, 2}
    assert selection.add(Candidate(4, 0.1, 0.9)) == {4}
    assert list(selection.candidates) == [3]


def test_written_to_json_and_read_back() -> None:
    selection = Selection()
    for candidate in (Candidate(1, 0.5, 0.3), Candidate(2, 0.4, 0.2)):
        selection.add(candidate)
    assert Selection.from_plain(json.loads(json.dumps(selection.to_plain()))) == selection
