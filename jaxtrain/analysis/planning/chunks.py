"""Detection of loss chunks that are too small: each chunk reads the whole output matrix.

A device reads the output matrix [V, D] twice for a chunk's matmuls and accumulates its gradient in
float32: 2 e V D + 8 V D bytes with e bytes per value, against 6 R V D FLOPs for R positions. On
v5p, about 300 positions take as long in matmuls as in memory traffic.
"""

from collections.abc import Iterator
from typing import Any

from jaxtrain.analysis.planning.textbook.facts import Facts
from jaxtrain.models.model import reads_tokens
from jaxtrain.parallel.sharding import Layout
from jaxtrain.training.settings import Config

# The smallest memory-bound fraction of a step that is worth a remark.
WORTH = 0.01


def work(config: Config, layout: Layout) -> tuple[int, int]:
    """Return the bytes and FLOPs of a step's chunked loss on a device that computes it: one of a
    pipeline's last stage, for which the other ranks wait. 0, 0 without chunks."""
    facts = Facts(config, layout).of_microbatches
    if not facts.is_text or config.loss.chunk_size is None:
        return 0, 0
    passes, matrix = facts.passes, facts.output_numbers
    moved = passes * facts.chunks * (2 * facts.value_bytes + 2 * 4) * matrix
    return moved, 6 * passes * facts.B * facts.T * matrix


def positions_per_chunk(config: Config, layout: Layout) -> int:
    """Return R, the number of positions of a chunk on one device."""
    facts = Facts(config, layout).of_microbatches
    return facts.B * facts.T // facts.chunks


def larger(config: Config) -> Iterator[dict[str, Any]]:
    """Yield bindings of chunks larger than the configured ones, up to a whole sequence."""
    chunk = config.loss.chunk_size
    if chunk is None or not reads_tokens(config.train.model):
        return
    length = config.train.data.abstract_batch(1).inputs.shape[1]
    while length % (chunk := 2 * chunk) == 0:
        yield {"Loss.chunk_size": chunk}
