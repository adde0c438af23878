"""Hundreds of thousands of batches of text leave the process's memory where it was."""

import numpy as np
import pytest

from jaxtrain.data.loader import batches
from jaxtrain.data.text.packing import PackedText

# Memory settles within 150,000 batches: it grows by 2 MB.
FIRST, BATCHES = 150_000, 350_000
LIMIT = 800_000  # bytes


def resident():
    """Bytes of this process that lie in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.slow
def test_memory_is_flat_over_200_000_batches():
    rng = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(5, 60, 3000))])
    tokens = rng.integers(0, 256, offsets[-1]).astype(np.uint8)
    text = PackedText(tokens, offsets, 16)
    at = {}
    stream = batches(text, global_batch_size=2, seed=0)
    for number in range(1, BATCHES + 1):
        batch = next(stream)
        if number in (FIRST, BATCHES):
            at[number] = resident()
    assert batch.inputs.shape == (2, 16)
    # A leak of one reference of 8 bytes a batch would be 1.6 MB.
    assert at[BATCHES] - at[FIRST] < LIMIT
