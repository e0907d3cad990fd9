"""Counter-based random numbers: known answers, an independent scalar version, distributions, and independence."""

from __future__ import annotations

import re
import shutil

import numpy as np
import pytest
import torch
from scipy import stats
from torch._inductor.utils import run_and_get_code

from dale import random
from dale.random import Key

KEY = random.key(7)


def splitmix(word: int) -> int:
    """The finaliser of splitmix64, written again on unsigned Python integers."""
    mask = (1 << 64) - 1
    word = (word + 0x9E3779B97F4A7C15) & mask
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & mask
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & mask
    return word ^ (word >> 31)


def lowbias(word: int) -> int:
    mask = (1 << 32) - 1
    word = ((word ^ (word >> 16)) * 0x7FEB352D) & mask
    word = ((word ^ (word >> 15)) * 0x846CA68B) & mask
    return word ^ (word >> 16)


def scalar_bits(seed: int, index: int, element: int) -> int:
    """The documented hash of one number, as an unsigned 32-bit integer."""
    word = splitmix(splitmix(index & (2**64 - 1)) ^ splitmix(seed & (2**64 - 1)))
    first, second = word & 0xFFFFFFFF, word >> 32
    inner = lowbias((element * 0x9E3779B9 + first) & 0xFFFFFFFF)
    return lowbias((inner + second) & 0xFFFFFFFF)


def test_splitmix_reference_outputs():
    # the published first outputs of splitmix64 seeded with 1234567
    expected = (6457827717110365317, 3203168211198807973, 9817491932198370423)
    for step, word in enumerate(expected):
        assert splitmix((1234567 + step * 0x9E3779B97F4A7C15) & (2**64 - 1)) == word
        assert random._mix64(random._signed(1234567 + step * 0x9E3779B97F4A7C15)) % 2**64 == word


@pytest.mark.parametrize("seed", [0, 1, -5, 2**63 + 11])
def test_bits_follow_the_documented_hash(seed):
    index = torch.tensor([0, 3, 2**31 + 5, 7 + (1 << 40), -2])
    drawn = random.bits(random.key(seed), index, (2, 3)).flatten(1)
    for row, i in enumerate(index.tolist()):
        assert [w % 2**32 for w in drawn[row].tolist()] == [scalar_bits(seed, i, e) for e in range(6)]


def test_known_answers_are_frozen():
    """Every recorded run depends on these numbers: they may never change."""
    index = torch.tensor([0, 5])
    assert random.key(0).word == -2152535657050944081
    assert random.key(0).fold("start").word == FROZEN["fold"]
    assert random.key(0).fold(random.stream("start")).word == FROZEN["fold"]
    assert random.bits(KEY, index, (3,)).tolist() == FROZEN["bits"]
    assert random.uniform(KEY, index, (2,)).tolist() == FROZEN["uniform"]
    assert random.permutation(KEY, 8).tolist() == FROZEN["permutation"]


FROZEN = {
    "fold": -8728607197919212082,
    "bits": [[-657004434, -1120775371, -1119467993], [-1605213232, -443641353, 897930229]],
    "uniform": [[0.8470292687416077, 0.7390491366386414], [0.6262571215629578, 0.8967066407203674]],
    "permutation": [6, 3, 7, 5, 2, 1, 0, 4],
}


def test_integer_and_tensor_keys_are_equal():
    word = torch.tensor(KEY.word)
    index = torch.arange(4)
    for data in (3, -1, 2**40, "stream"):
        plain, held = KEY.fold(data), Key(word).fold(data)
        assert isinstance(held.word, torch.Tensor)
        assert int(held.word) == plain.word
        assert torch.equal(random.bits(plain, index, (5,)), random.bits(held, index, (5,)))
    assert int(KEY.fold(torch.tensor(9)).word) == KEY.fold(9).word
    assert torch.equal(random.permutation(KEY, 9), random.permutation(Key(word), 9))


def test_a_key_passes_through_and_folds_do_not_commute():
    assert random.key(KEY) is KEY
    words = {
        KEY.word,
        KEY.fold(0).word,
        KEY.fold(1).word,
        KEY.fold(0).fold(1).word,
        KEY.fold(1).fold(0).word,
        KEY.fold("0").word,
        random.key(8).word,
    }
    assert len(words) == 7


def test_a_name_between_seed_and_number_keeps_them_apart():
    """Seeds and numbers are mixed alike: folded directly, equal ones cancel, as the documentation says."""
    assert {random.key(seed).fold(seed).word for seed in range(9)} == {random.key(0).word}
    named = {random.key(seed).fold("step").fold(number).word for seed in range(9) for number in range(9)}
    assert len(named) == 81


def test_numbers_depend_on_the_example_and_not_on_its_place():
    index = torch.arange(40)
    whole = random.normal(KEY, index, (3, 2))
    order = random.permutation(KEY.fold("order"), 40)
    assert torch.equal(random.normal(KEY, index[order], (3, 2)), whole[order])
    assert torch.equal(torch.cat([random.normal(KEY, part, (3, 2)) for part in index.split(7)]), whole)


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    random.laplace(KEY, torch.arange(10), (10,))
    random.permutation(KEY, 10)
    assert torch.equal(torch.get_rng_state(), before)


def along(axis: str, count: int = 100_000) -> torch.Tensor:
    """Uniform numbers in which one coordinate of (index, step, element) runs and the others stand still."""
    if axis == "element":
        return random.uniform(KEY, torch.tensor([12]), (count,)).flatten()
    if axis == "index":
        return random.uniform(KEY, torch.arange(count))
    steps = torch.arange(count)
    words = random.key(3).fold("step").fold(steps).word
    # one key per step: example 5 under each of them, drawn by folding the tensor of steps
    return torch.stack([random.uniform(Key(word), torch.tensor([5])) for word in words[:4000]]).flatten()


@pytest.mark.parametrize("axis", ["element", "index", "step"])
def test_uniform_along_every_axis(axis):
    values = along(axis)
    assert 0.0 < float(values.min()) < float(values.max()) < 1.0
    counts = torch.histc(values, 100, 0.0, 1.0).numpy()
    assert stats.chisquare(counts).pvalue > 1e-4
    # neighbours: a 10 x 10 table of pairs, and serial correlation at several distances
    cells = (values * 10).long()
    pairs = torch.bincount(cells[:-1] * 10 + cells[1:], minlength=100).numpy()
    assert stats.chisquare(pairs).pvalue > 1e-4
    bound = 4.5 / len(values) ** 0.5
    for lag in (1, 2, 3, 8, 28, 64):
        assert abs(np.corrcoef(values[:-lag], values[lag:])[0, 1]) < bound


def test_every_bit_is_fair_and_changes_with_every_coordinate():
    words = random.bits(KEY, torch.arange(300), (300,)).flatten().numpy().view(np.uint32)
    planes = np.unpackbits(words.view(np.uint8)).reshape(len(words), 32)
    assert np.abs(planes.mean(axis=0) - 0.5).max() < 4.5 * 0.5 / len(words) ** 0.5
    for other in (
        random.bits(KEY, torch.arange(1, 301), (300,)),
        random.bits(KEY.fold(1), torch.arange(300), (300,)),
        random.bits(random.key(8), torch.arange(300), (300,)),
    ):
        flipped = np.unpackbits((words ^ other.flatten().numpy().view(np.uint32)).view(np.uint8)).mean()
        assert abs(flipped - 0.5) < 4.5 * 0.5 / (32 * len(words)) ** 0.5


def test_streams_are_uncorrelated():
    index = torch.arange(400)
    streams = [random.normal(KEY.fold(name), index, (100,)).flatten() for name in ("start", "step", 0, 1, 2)]
    streams.append(random.normal(KEY, index + (1 << 40), (100,)).flatten())  # the second chain of each example
    streams.append(random.normal(KEY, index, (100,)).flatten())
    table = np.corrcoef(torch.stack(streams).numpy()) - np.eye(len(streams))
    assert np.abs(table).max() < 4.5 / 40_000**0.5


def test_normal_and_laplace_distributions():
    index = torch.arange(500)
    normal = random.normal(KEY, index, (200,)).double().flatten().numpy()
    laplace = random.laplace(KEY.fold("other"), index, (200,)).double().flatten().numpy()
    assert stats.kstest(normal, "norm").pvalue > 1e-3
    assert stats.kstest(laplace, "laplace").pvalue > 1e-3
    assert abs(normal.mean()) < 4.5 / len(normal) ** 0.5
    assert abs(normal.var() - 1.0) < 4.5 * (2.0 / len(normal)) ** 0.5
    assert abs(laplace.var() - 2.0) < 4.5 * (20.0 / len(laplace)) ** 0.5  # fourth moment 24
    assert abs(stats.kurtosis(laplace) - 3.0) < 0.5


def test_ends_of_the_distributions_are_finite(monkeypatch):
    """The two extreme words give the largest numbers there are, finite and symmetric."""
    for transform in (random.normal, random.laplace):
        ends = []
        for word in (0, -1):
            monkeypatch.setattr(random, "bits", lambda *args, word=word: torch.tensor([word], dtype=torch.int32))
            ends.append(float(transform(KEY, torch.arange(1))))
        assert 5.0 < ends[1] < 18.0
        assert ends[0] == -ends[1]


def test_integers_cover_their_range():
    for high in (1, 2, 3, 7, 1000):
        values = random.integers(KEY, torch.arange(2000), high, (10,))
        assert values.dtype == torch.int64
        assert int(values.min()) >= 0
        assert int(values.max()) <= high - 1
        if high > 1:
            assert stats.chisquare(torch.bincount(values.flatten(), minlength=high).numpy()).pvalue > 1e-4


def test_integers_never_reach_high(monkeypatch):
    monkeypatch.setattr(random, "bits", lambda *args: torch.tensor([-1], dtype=torch.int32))
    assert all(int(random.integers(KEY, torch.arange(1), high)) == high - 1 for high in range(1, 5000))
    assert int(random.integers(KEY, torch.arange(1), 2**20)) == 2**20 - 1


def test_uniform_between_bounds():
    values = random.uniform(KEY, torch.arange(1000), (10,), low=-1.0, high=1.0)
    assert -1.0 < float(values.min()) < -0.99
    assert 0.99 < float(values.max()) < 1.0
    assert torch.equal(values, 2.0 * random.uniform(KEY, torch.arange(1000), (10,)) - 1.0)


def test_permutations_are_permutations_and_all_alike():
    for count in (0, 1, 2, 1000):
        assert torch.equal(random.permutation(KEY, count).sort().values, torch.arange(count))
    orders = [tuple(random.permutation(KEY.fold(epoch), 4).tolist()) for epoch in range(4800)]
    counts = np.unique(np.array([hash(order) for order in orders]), return_counts=True)[1]
    assert len(counts) == 24
    assert stats.chisquare(counts).pvalue > 1e-4


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler itself
@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler needs g++")
def test_compiled_hashes_keep_their_constants_out_of_index_expressions():
    """A GPU kernel counts in 32 bits: Inductor may not add or multiply the hash's constants into what it counts."""

    def draw(word, index):
        return *(key.word for key in Key(word).each(3)), random.bits(Key(word), index, (2, 3))

    word, index = torch.tensor(KEY.word), torch.tensor([0, 3, 2**31 + 5, -2])
    compiled, codes = run_and_get_code(torch.compile(draw, fullgraph=True), word, index)
    for got, expected in zip(compiled, draw(word, index), strict=True):
        assert torch.equal(got, expected)
    assert codes
    assert [re.findall(r"\d{10,}L", code) for code in codes] == [[]] * len(codes)  # as C++ writes a number of an index
