"""Counter-based random numbers: randomness is counted, not consumed.

Every random number of the product is a pure function of (key, example index, element), where a key is folded from
a seed, a stream name, a step, and so on. No generator is advanced, so the numbers are the same whatever the batch
split, the number of processes, the resume point or the graph capture, and no other stream is disturbed.

The hash: keys are mixed in 64 bits (the finaliser of splitmix64); an element's number comes from two rounds of a
32-bit avalanche mixer (Wellons' ``lowbias32``) over its position, each round keyed by one half of its example's
64-bit word. All of it is integer tensor arithmetic, which wraps alike on every device and fuses under a compiler.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

_Word = TypeVar("_Word", int, Tensor)

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 0xFFFFFFFFFFFFFFFF


def _signed(word: int, bits: int = 64) -> int:
    """Read the low `bits` of a Python integer as a signed number, as an int64 (or int32) tensor would hold it."""
    word &= (1 << bits) - 1
    return word - (1 << bits) if word >> (bits - 1) else word


_ADD, _MUL1, _MUL2 = _signed(_GOLDEN), _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)
_LOW1, _LOW2, _STEP = _signed(0x7FEB352D, 32), _signed(0x846CA68B, 32), _signed(0x9E3779B9, 32)


def _mix64(word: _Word) -> _Word:
    """Scramble a 64-bit word so that every input bit reaches every output bit (splitmix64's finaliser)."""
    if isinstance(word, int):
        value = (word + _GOLDEN) & _MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        return _signed(value ^ (value >> 31))
    value = word + _ADD
    value = (value ^ ((value >> 30) & ((1 << 34) - 1))) * _MUL1
    value = (value ^ ((value >> 27) & ((1 << 37) - 1))) * _MUL2
    return value ^ ((value >> 31) & ((1 << 33) - 1))


def _mix32(word: Tensor) -> Tensor:
    """Scramble int32 words (Wellons' lowbias32)."""
    word = (word ^ ((word >> 16) & 0xFFFF)) * _LOW1
    word = (word ^ ((word >> 15) & 0x1FFFF)) * _LOW2
    return word ^ ((word >> 16) & 0xFFFF)


def _low32(word: Tensor) -> Tensor:
    """The low 32 bits of int64 words, as int32."""
    return (((word & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000).to(torch.int32)


def _numbers(count: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """0 .. count - 1, to be hashed."""
    numbers = torch.arange(count, dtype=dtype, device=device)
    if torch.compiler.is_compiling():
        # Inductor would carry the hash's first sums and products into index expressions: unbounded there, they do not
        # fit the 32 bits that a GPU kernel counts in. It carries nothing past a bitwise operation; this one changes
        # no number.
        numbers = numbers & torch.iinfo(dtype).max
    return numbers


def stream(name: str) -> int:
    """The number of a named stream: `key.fold(name)` is `key.fold(stream(name))`."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


@dataclass(frozen=True)
class Key:
    """A 64-bit word that names a stream of random numbers; `fold` derives a new, unrelated one.

    The word is a Python integer, or a zero-dimensional int64 tensor where it has to change under a captured graph.
    """

    word: int | Tensor

    def fold(self, data: int | str | Tensor) -> Key:
        """Return the key of a sub-stream: `key.fold("start")`, `key.fold("step").fold(step)`."""
        if isinstance(data, str):
            data = stream(data)
        # a number next to a tensor stays a number: a copy to the device would stop a captured graph
        if isinstance(data, Tensor):
            return Key(_mix64(_mix64(data.to(torch.int64)) ^ self.word))
        mixed = _mix64(_signed(data))
        if isinstance(self.word, Tensor):
            return Key(_mix64(self.word ^ mixed))
        return Key(_mix64(self.word ^ mixed))

    def each(self, count: int) -> list[Key]:
        """Return `[self.fold(0), ..., self.fold(count - 1)]`; on a device, by one operation for all."""
        if isinstance(self.word, int):
            return [self.fold(number) for number in range(count)]
        return [Key(word) for word in self.fold(_numbers(count, torch.int64, self.word.device)).word]  # type: ignore[union-attr]


def key(seed: int | Key) -> Key:
    """Return the root key of a seed (a key passes through).

    Fold a name into it before a number: seeds and numbers are mixed alike, and of two that are equal nothing is left
    (`key(s).fold(s)` is one key, whatever s is).
    """
    return seed if isinstance(seed, Key) else Key(_mix64(_signed(seed)))


def bits(key: Key, index: Tensor, shape: Sequence[int] = ()) -> Tensor:
    """Return int32 words of shape (len(index), *shape): the hash of (key, index[i], element)."""
    word = key.word.to(index.device) if isinstance(key.word, Tensor) else key.word
    words = _mix64(_mix64(index.to(torch.int64)) ^ word)
    count = math.prod(shape)
    first, second = _low32(words).unsqueeze(1), _low32(words >> 32).unsqueeze(1)
    element = _numbers(count, torch.int32, index.device) * _STEP
    return _mix32(_mix32(element + first) + second).view(len(index), *shape)


def uniform(key: Key, index: Tensor, shape: Sequence[int] = (), *, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Draw from U(low, high), ends excluded, as float32 of shape (len(index), *shape)."""
    # 23 bits and a half: the midpoints of 2^23 equal cells, each exactly representable, never 0 and never 1
    unit = (((bits(key, index, shape) >> 9) & 0x7FFFFF).to(torch.float32) + 0.5) * 2.0**-23
    return unit if (low, high) == (0.0, 1.0) else low + (high - low) * unit


def normal(key: Key, index: Tensor, shape: Sequence[int] = ()) -> Tensor:
    """Draw from N(0, 1) by inversion, as float32 of shape (len(index), *shape)."""
    return torch.erfinv(2.0 * uniform(key, index, shape) - 1.0) * math.sqrt(2.0)


def laplace(key: Key, index: Tensor, shape: Sequence[int] = ()) -> Tensor:
    """Draw from Laplace(0, 1) (variance 2) by inversion, as float32 of shape (len(index), *shape)."""
    centred = 2.0 * uniform(key, index, shape) - 1.0
    return -torch.sign(centred) * torch.log1p(-centred.abs())


def integers(key: Key, index: Tensor, high: int, shape: Sequence[int] = ()) -> Tensor:
    """Draw integers uniformly from 0 .. high - 1 (high up to 2^20), as int64 of shape (len(index), *shape)."""
    return (uniform(key, index, shape) * high).to(torch.int64)


def permutation(key: Key, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Return a random order of 0 .. count - 1: the same on every device."""
    index = _numbers(count, torch.int64, device)
    word = key.word.to(index.device) if isinstance(key.word, Tensor) else key.word
    return torch.argsort(_mix64(_mix64(index) ^ word), stable=True)
