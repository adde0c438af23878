"""Shuffle of the training data: a permutation of examples, computed one index at a time.

A position is encrypted to an example's index: eight rounds of a Feistel network over the least
power of two not below their number, repeated while the result is out of range (Black and Rogaway
2002, Ciphers with arbitrary finite domains). Only the requested positions are computed, however
many examples there are. The round function is splitmix64's finalizer (Steele, Lea and Flood 2014).

grain's `index_shuffle` is such a cipher too; with the four rounds of grain's own shuffle, neighbors
map to neighbors (of the 100 pairs of tenths of 10**10 examples some occur 4 times too often), it
takes 6 us per position, 2 ms in small sets, and is no permutation of 2**k + 1 examples.
"""

import functools

import numpy as np

VERSION = "feistel 8"  # saved with a checkpoint: a run cannot resume with another order
_ROUNDS = 8
_BLOCK = 4096  # positions encrypted together: NumPy's calls cost the same for 64 of them
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def shuffle_nearby(positions: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Return the same as `shuffle`, faster for nearby positions that advance from call to call.

    The blocks that the positions are in are cached, the latest few of them.

    The latest few blocks of positions that contain them are cached.
    """
    if not len(positions):
        return np.empty(0, np.int64)
    first, last = int(np.min(positions)) // _BLOCK, int(np.max(positions)) // _BLOCK
    if last > first + 1:
        return shuffle(positions, count, seed)
    blocks = [_block(number, count, seed) for number in range(first, last + 1)]
    return np.concatenate(blocks)[positions - first * _BLOCK]


@functools.lru_cache(maxsize=64)
def _block(number: int, count: int, seed: int) -> np.ndarray:
    return shuffle(np.arange(number * _BLOCK, (number + 1) * _BLOCK), count, seed)


def shuffle(positions: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Return the examples at these positions of concatenated epochs, each epoch in its own order.

    Args:
      positions: nonnegative, [n].
      count: examples in an epoch, at least 1.
      seed: of the run, under 2**64.

    Returns:
      int64 [n], each under `count`.
    """
    epochs, within = np.divmod(np.asarray(positions, np.int64), count)
    keys = _mix(_mix(np.full(len(within), seed, np.uint64)) + epochs.astype(np.uint64))
    bits = max(2, (count - 1).bit_length())
    found = _encipher(within.astype(np.uint64), keys, bits)
    while (past := np.flatnonzero(found >= count)).size:
        found[past] = _encipher(found[past], keys[past], bits)
    return found.astype(np.int64)


def _encipher(numbers: np.ndarray, keys: np.ndarray, bits: int) -> np.ndarray:
    """Permute the integers below 2**bits by key; uint64 [n]."""
    low_bits = np.uint64(bits // 2)
    low_mask, high_mask = (np.uint64((1 << size) - 1) for size in (bits // 2, bits - bits // 2))
    high, low = numbers >> low_bits, numbers & low_mask
    for number in range(_ROUNDS):
        key = _mix(keys + np.uint64(number))
        if number % 2:
            low = low ^ (_mix(high ^ key) & low_mask)
        else:
            high = high ^ (_mix(low ^ key) & high_mask)
    return high << low_bits | low


def _mix(numbers: np.ndarray) -> np.ndarray:
    """Mix 64-bit integers so that every bit depends on all others (splitmix64)."""
    numbers = numbers + _GOLDEN  # arrays of uint64 wrap around, as intended
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
