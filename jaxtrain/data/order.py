"""The order of training: which example stands at which place of a run's endless shuffled stream."""

import math

import numpy as np
from grain.experimental import index_shuffle

# Of fewer examples a block of the cipher has more than 16 times as many numbers, nearly all of them
# no example's: so many passes are quicker one place at a time, in C++.
FEWEST_TOGETHER = 4096

# Rounds of the cipher; fewest bits of a block of it.
_ROUNDS, _LEAST_BITS = 4, 16


def shuffled(places: np.ndarray, count: int, seed: int) -> np.ndarray:
    """The examples at these places of epochs laid end to end, each epoch in an order of its own.

    What `grain.MapDataset.range(count).shuffle(seed=seed).repeat()` has there, for many places in
    one go: one by one `grain.experimental.index_shuffle` takes 6 us each, more than a row of text.
    An example's number goes through 4 rounds of the Simon cipher (https://eprint.iacr.org/2013/404,
    section 3.2), keyed by seed and epoch, on the least even number of bits, 16 or more, that
    log2(count - 1) needs; a number that is no example's goes through again until it is one.

    Args:
      places: not negative, [n].
      count: examples in an epoch, at least 1.
      seed: of the first epoch; that of epoch e is seed + e modulo 2**32.

    Returns:
      int64 [n], each under `count`.
    """
    places = np.asarray(places, np.int64)
    if count < FEWEST_TOGETHER:
        found = [
            index_shuffle(
                place % count,
                max_index=count - 1,
                seed=(seed + place // count) % 2**32,
                rounds=_ROUNDS,
            )
            for place in places.tolist()
        ]
        return np.array(found, np.int64)
    # In float64 as in grain, and cut off as there: of 2**k + 1 examples, k even, the last one's
    # number is a bit too long. It shares its place with another; runs go on by this order.
    bits = math.ceil(math.log2(float(count - 1)))
    word = max(bits + bits % 2, _LEAST_BITS) // 2
    dtype = np.uint32 if word <= 16 else np.uint64
    epochs, numbers = np.divmod(places, count)
    present, of_place = np.unique(epochs, return_inverse=True)
    keys_RE = _round_keys(seed + present).astype(dtype) & dtype((1 << word) - 1)
    keys_RN = keys_RE[:, of_place]
    found = np.empty_like(places)
    waiting, numbers = np.arange(len(places)), numbers.astype(dtype)
    while len(waiting):
        numbers = _ciphered(numbers, keys_RN, word)
        there = numbers < count
        found[waiting[there]] = numbers[there]
        again = ~there
        waiting, numbers, keys_RN = waiting[again], numbers[again], keys_RN[:, again]
    return found


def _ciphered(numbers: np.ndarray, keys_RN: np.ndarray, word: int) -> np.ndarray:
    """Blocks of two words of `word` bits after all rounds; higher bits are cut off."""
    mask = (1 << word) - 1
    left, right = numbers >> word & mask, numbers & mask
    for number in range(0, _ROUNDS, 2):
        left = left ^ _mixed(right, word) ^ keys_RN[number]
        right = right ^ _mixed(left, word) ^ keys_RN[number + 1]
    return left << word | right


def _mixed(x: np.ndarray, word: int) -> np.ndarray:
    """x rotated by 1 and by 8, both bits set, except where it differs rotated by 2."""
    twice = x << word | x  # a rotation to the left by r is this shifted to the right by word - r
    turned = twice >> (word - 1) & twice >> (word - 8) ^ twice >> (word - 2)
    return turned & ((1 << word) - 1)


def _round_keys(seeds: np.ndarray) -> np.ndarray:
    """uint32 [rounds, n]: what C++'s std::seed_seq{seed} generates for each seed modulo 2**32.

    Its algorithm (C++17, [rand.util.seedseq]) for one seed and four numbers.
    """
    size, mid, end = _ROUNDS, 1, 2
    added = np.zeros((size, len(seeds)), np.uint32)
    added += np.arange(size, dtype=np.uint32)[:, None]
    added[0] += np.uint32(1)
    added[1] += seeds.astype(np.uint32)
    keys = np.full(added.shape, 0x8B8B8B8B, np.uint32)
    for k in range(size):
        x = keys[k] ^ keys[(k + mid) % size] ^ keys[k - 1]
        first = (x ^ x >> 27) * np.uint32(1664525)
        keys[(k + mid) % size] += first
        keys[(k + end) % size] += first + added[k]
        keys[k] = first + added[k]
    for k in range(size):
        x = keys[k] + keys[(k + mid) % size] + keys[k - 1]
        first = (x ^ x >> 27) * np.uint32(1566083941)
        keys[(k + mid) % size] ^= first
        keys[(k + end) % size] ^= first - np.uint32(k)
        keys[k] = first - np.uint32(k)
    return keys
