"""Detection of loss chunks that are too small: each chunk reads the whole output matrix.

A device reads the output matrix [V, D] twice for a chunk's products and adds to its gradient in
float32: 2 e V D + 8 V D bytes with e bytes per value, against 6 R V D FLOPs of R positions. On v5p
some 300 positions take as long in matmuls as in memory.
"""

from collections.abc import Iterator
from typing import Any

from jaxtrain.analysis.planning.textbook.facts import Facts
from jaxtrain.models.model import reads_tokens
from jaxtrain.parallel.sharding import Layout
from jaxtrain.training.settings import Config

# A loss that waits for memory for less of a step than this is left alone.
WORTH = 0.01


def work(config: Config, layout: Layout) -> tuple[int, int]:
    """Bytes and FLOPs of a step's loss, made chunk by chunk, on a device that computes it: those of
    a pipeline's last stage, for which the other ranks wait. None where logits are made at once."""
    facts = Facts(config, layout).of_microbatches
    if not facts.is_text or config.loss.chunk_size is None:
        return 0, 0
    passes, matrix = facts.passes, facts.output_numbers
    moved = passes * facts.chunks * (2 * facts.value_bytes + 2 * 4) * matrix
    return moved, 6 * passes * facts.B * facts.T * matrix


def places(config: Config, layout: Layout) -> int:
    """Of a chunk on one device: R."""
    facts = Facts(config, layout).of_microbatches
    return facts.B * facts.T // facts.chunks


def larger(config: Config) -> Iterator[dict[str, Any]]:
    """Bindings of larger chunks than are asked for, up to a sequence in one."""
    chunk = config.loss.chunk_size
    if chunk is None or not reads_tokens(config.train.model):
        return
    length = config.train.data.abstract_batch(1).inputs.shape[1]
    while length % (chunk := 2 * chunk) == 0:
        yield {"Loss.chunk_size": chunk}
