"""Log-probabilities of a reference model (DPO), computed once and cached.

The reference is the run's initial model. A resumed run no longer has it, so its log-probabilities
are stored next to its checkpoints, with a digest of themselves and of the data. Letters: B rows, T
length.
"""

import dataclasses
import functools
import io
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxtrain.config.buckets import AnyPath
from jaxtrain.config.errors import UserError
from jaxtrain.config.files import write_atomically
from jaxtrain.config.untrusted import MalformedError
from jaxtrain.data.batch import Batch
from jaxtrain.data.source import Dataset, digest
from jaxtrain.data.text.chat.preferences import Pairs
from jaxtrain.data.vectors.source import read_npz
from jaxtrain.nn.transformer.language_model import hidden_states, logits
from jaxtrain.run.generation.decoding import for_texts
from jaxtrain.training.objectives.losses import cross_entropy
from jaxtrain.training.objectives.tokens import TokenObjective
from jaxtrain.training.setup import Setup
from jaxtrain.training.state import TrainState

FILE = "reference.npz"
_ROWS = 8  # rows per device: for evaluation's logits, without gradients


def first_reference(
    dataset: Dataset,
    setup: Setup,
    state: TrainState,
    workdir: AnyPath | None,
    *,
    report: Callable[[str], None],
) -> Dataset:
    """Return the data with the initial model's log-probabilities; called by all processes.

    Args:
      dataset: the opened data, of pairs.
      setup: the synchronous program.
      state: the initial state, from `Step.eval_state`.
      workdir: the run's folder, where they are stored; None keeps them in memory.
      report: called with each line to print.
    """
    train, heldout = _pairs(dataset)
    report(f"Log-probabilities by the reference: of {len(train) + len(heldout):,} pairs, once")
    log_probabilities = (
        _log_probabilities(setup, state, train),
        _log_probabilities(setup, state, heldout),
    )
    if workdir is not None and jax.process_index() == 0:
        write_atomically(workdir / FILE, _content(dataset, *log_probabilities))
    return _with(dataset, *log_probabilities)


def stored_reference(dataset: Dataset, workdir: AnyPath | None) -> Dataset:
    """Return the data with the log-probabilities that `first_reference` stored.

    Raises:
      UserError: the file is missing, damaged, or of other data.
    """
    file = None if workdir is None else workdir / FILE
    if file is None or not file.is_file():
        raise UserError(
            f"{workdir}: there is no {FILE}, the outputs of the initial model on the data, which "
            "the loss needs; restore it, or start another run"
        )
    try:
        found = read_npz(file, ["train", "heldout", "digest"])
        train, heldout, stored_digest = found["train"], found["heldout"], str(found["digest"])
    except MalformedError as error:
        raise UserError(f"{file} is damaged ({error}); restore it, or start another run") from error
    if stored_digest != digest({"data": dataset.digest}, [train, heldout]):
        raise UserError(
            f"{file} is damaged, or of other data than these ({dataset.digest[:16]}); restore "
            "both, or start another run"
        )
    return _with(dataset, train, heldout)


def _pairs(dataset: Dataset) -> tuple[Pairs, Pairs]:
    assert isinstance(dataset.train, Pairs), "preflight asks for them"
    assert isinstance(dataset.heldout, Pairs), "both are"
    return dataset.train, dataset.heldout


def _with(dataset: Dataset, train: np.ndarray, heldout: np.ndarray) -> Dataset:
    ours = _pairs(dataset)
    return dataclasses.replace(
        dataset,
        train=dataclasses.replace(ours[0], reference=train),
        heldout=dataclasses.replace(ours[1], reference=heldout),
    )


def _log_probabilities(setup: Setup, state: TrainState, pairs: Pairs) -> np.ndarray:
    """Return the model's log-probability of each target, float32 [pairs, T]; 0 where it does not
    count."""
    setup = for_texts(setup)
    size, found = _ROWS * setup.layout.batch_devices(), list[np.ndarray]()
    with setup.layout.active(), setup.precision.products():
        for begin in range(0, len(pairs), size):
            rows = np.minimum(np.arange(begin, begin + size), len(pairs) - 1)
            batch = pairs.examples(rows)
            placed = jax.device_put(batch, setup.batch_shardings(batch))
            found.append(np.asarray(_of_batch(setup, state, placed)))
    return np.concatenate(found)[: len(pairs)]


@functools.partial(jax.jit, static_argnums=0)
def _of_batch(setup: Setup, state: TrainState, batch: Batch) -> jax.Array:
    objective, model = setup.objective, setup.model(state)
    assert isinstance(objective, TokenObjective), "pairs are of tokens"
    assert batch.positions is not None, "a batch of text has positions"
    mask = objective.mask(batch)
    h_BTD, _, _ = hidden_states(model, batch.inputs, batch.positions, mask, setup.execution)
    log_p_BT = -cross_entropy(logits(model, h_BTD), batch.targets)
    # Replicated, so that each process can read them.
    return jax.sharding.reshard(jnp.where(batch.loss_mask != 0, log_p_BT, 0.0), P())


def _content(dataset: Dataset, train: np.ndarray, heldout: np.ndarray) -> bytes:
    stream = io.BytesIO()
    made = digest({"data": dataset.digest}, [train, heldout])
    np.savez(stream, train=train, heldout=heldout, digest=np.array(made))
    return stream.getvalue()
