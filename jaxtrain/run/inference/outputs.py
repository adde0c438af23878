"""Outputs of a trained model on the host: logits, embeddings, regression outputs, `[MASK]` tokens.

Embeddings are hidden states, or one vector per text (sentence embeddings).
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxtrain.config.errors import UserError
from jaxtrain.data.batch import Batch, on_host, stack
from jaxtrain.data.source import existing_path
from jaxtrain.data.text.source import text_of
from jaxtrain.data.tokenization.tokenizer import Tokenizer, open_tokenizer
from jaxtrain.data.vectors.source import VectorData
from jaxtrain.models.model import Model, TokenModel, pooling_of, vector_model
from jaxtrain.nn.layers import pool
from jaxtrain.nn.transformer.language_model import hidden_states
from jaxtrain.run.generation.decoding import for_one_text
from jaxtrain.run.inference.inputs import AT_ONCE, row_of, texts_of, vectors_of
from jaxtrain.training.objectives.losses import Loss
from jaxtrain.training.objectives.objective import LogitsObjective
from jaxtrain.training.objectives.tokens import TokenObjective
from jaxtrain.training.setup import Setup
from jaxtrain.training.state import TrainState


def logits(setup: Setup, model: Model, state: TrainState, inputs: Any) -> np.ndarray:
    """Return the logits of inputs, float32 [B, T, V] of tokens or [B, C] of images.

    Every device computes with all rows, split over `tensor` and `expert` alone: any number of rows
    is accepted, and any length within the model's context.

    Args:
      setup: the synchronous program.
      model: the model's settings.
      state: from `Step.eval_state`.
      inputs: integer tokens [B, T], each row one text; images [B, H, W, C]; or a `Batch`, whose
        documents are masked from each other.

    Raises:
      UserError: the model cannot read them, or has no logits.
    """
    objective = setup.objective
    if not isinstance(objective, LogitsObjective):
        raise UserError(
            f"Trainer.logits: a model of objective {objective.name!r} has no logits; "
            "Trainer.predict returns its outputs"
        )
    is_batch = isinstance(inputs, Batch)
    batch = on_host(inputs) if is_batch else objective.reading(np.asarray(inputs))
    setup = _of_any_rows(setup)
    found = list(objective.validate(batch, model, Loss(), setup.layout))
    if found:
        raise UserError("\n".join(f"Trainer.logits: {line}" for line in found))
    with setup.layout.active(), setup.precision.products():
        return np.array(_logits(setup, state, batch))


def embeddings(setup: Setup, model: Model, state: TrainState, batch: Batch) -> np.ndarray:
    """Return the embedding of each text, float32 [B, D], computed like `logits`.

    Args:
      setup: the synchronous program.
      model: the model's settings.
      state: from `Step.eval_state`.
      batch: one text per row, with padding after it.
    """
    setup = _of_any_rows(setup)
    with setup.layout.active(), setup.precision.products():
        return np.array(_embeddings(setup, model, state, batch))


def regression_outputs(setup: Setup, state: TrainState, vectors_BD: np.ndarray) -> np.ndarray:
    """Return the regression outputs for vectors, float32 [B, K], computed like `logits`."""
    setup = _of_any_rows(setup)
    with setup.layout.active(), setup.precision.products():
        return np.array(_regression_outputs(setup, state, vectors_BD))


def _of_any_rows(setup: Setup) -> Setup:
    """Return the layout with all rows on every device, and the reference kernel, which supports any
    length and documents."""
    execution = dataclasses.replace(setup.execution, kernel="reference")
    layout = for_one_text(setup.layout)
    return dataclasses.replace(setup, layout=layout, execution=execution)


@functools.partial(jax.jit, static_argnums=0)
def _logits(setup: Setup, state: TrainState, batch: Batch) -> jax.Array:
    assert isinstance(setup.objective, LogitsObjective), "asked before"
    model = setup.model(state)
    found = setup.objective.logits(model, state.statistics, batch, setup.execution)
    # Replicated, so that each process can read them.
    return jax.sharding.reshard(found, P())


@functools.partial(jax.jit, static_argnums=(0, 1))
def _embeddings(setup: Setup, model: Model, state: TrainState, batch: Batch) -> jax.Array:
    objective, ids_BT = setup.objective, batch.segment_ids
    assert isinstance(objective, TokenObjective), "of hidden states"
    pooling = pooling_of(model)
    assert pooling is not None, "asked before"
    assert ids_BT is not None, "texts have padding"
    assert batch.positions is not None, "and places"
    h_BTD, _, _ = hidden_states(
        setup.model(state), batch.inputs, batch.positions, objective.mask(batch),
        setup.execution,
    )  # fmt: skip
    found_BD = pool(h_BTD, ids_BT, pooling[0], normalized=pooling[1])
    return jax.sharding.reshard(found_BD, P())


@functools.partial(jax.jit, static_argnums=0)
def _regression_outputs(setup: Setup, state: TrainState, vectors_BD: jax.Array) -> jax.Array:
    model: Any = setup.model(state)
    found_BK, _ = model(vectors_BD, state.statistics, setup.execution, train=False)
    return jax.sharding.reshard(found_BK.astype(jnp.float32), P())


@dataclasses.dataclass(frozen=True, eq=False)
class RegressionOutput:
    """The regression outputs of one vector.

    Attributes:
      name: the file and the vector's index in it, or in an array.
      numbers: float32 [K], in the units of the data; for an autoencoder the reconstruction.
      squared_error: for an autoencoder the mean squared error of the scaled features: the
        loss of this one vector.
    """

    name: str
    numbers: np.ndarray
    squared_error: float | None = None

    def __str__(self) -> str:
        # The shortest decimals that distinguish the float32 values.
        content: dict[str, Any] = {
            "input": self.name, "numbers": [float(str(number)) for number in self.numbers]
        }  # fmt: skip
        if self.squared_error is not None:
            content["squared_error"] = self.squared_error
        return json.dumps(content, ensure_ascii=False)


def predict_vectors(
    given: Sequence[Any],
    model: Model,
    data: object,
    outputs_of: Callable[[np.ndarray], np.ndarray],
    *,
    again: bool,
) -> Iterator[RegressionOutput]:
    """Yield the regression outputs of each vector, prepared as in evaluation.

    Args:
      given: as in `vectors_of`.
      model: the model's settings.
      data: its training data, which scales vectors.
      outputs_of: vectors [N, D] -> the model's outputs, [N, K].
      again: whether it reconstructs the vectors themselves.

    Raises:
      UserError: as in `vectors_of`; the data are not vectors.
    """
    sizes = vector_model(model)
    if not isinstance(data, VectorData):
        raise UserError(
            f"predict: {type(model).__name__} reads vectors, and Train.data=@"
            f"{type(data).__name__}() does not say how they are scaled; use @VectorData()"
        )
    called, table = vectors_of(given, sizes)
    vectors = data.prepare(table)
    found = outputs_of(vectors)
    if not again:
        yield from map(RegressionOutput, called, data.numbers_again(found))
        return
    errors = np.square(found - vectors).mean(-1)
    for name, numbers, error in zip(called, data.vectors_again(found), errors, strict=True):
        yield RegressionOutput(name, numbers, float(error))


@dataclasses.dataclass(frozen=True, eq=False)
class Embedding:
    """The embedding of one text.

    Attributes:
      name: the text itself, or its file.
      vector: float32 [D].
    """

    name: str
    vector: np.ndarray

    def __str__(self) -> str:
        # The shortest decimals that distinguish the float32 values.
        numbers = [float(str(number)) for number in self.vector]
        return json.dumps({"input": self.name, "embedding": numbers}, ensure_ascii=False)


def embed_texts(
    given: Sequence[Any],
    model: TokenModel,
    data: object,
    vectors: Callable[[Batch], np.ndarray],
    *,
    report: Callable[[str], object],
) -> Iterator[Embedding]:
    """Yield the embedding of each text, independent of padding and of the other texts.

    Args:
      given: texts, or .txt files with one in each.
      model: the model's settings.
      data: the run's: its tokenizer, and the maximum length.
      vectors: computes the embeddings of a batch of texts, [B, D].
      report: called with the number of truncated texts.

    Raises:
      UserError: a text is empty, or the run's data have no tokenizer.
    """
    text = text_of(data)
    if text is None:
        raise UserError(
            f"predict: {type(model).__name__} embeds texts, for which Train.data=@"
            f"{type(data).__name__}() names no tokenizer; use @TextData()"
        )
    path = None
    if text.tokenizer != "byte":
        path = existing_path("TextData.tokenizer", text.tokenizer, words=("byte",))
    tokenizer = open_tokenizer(text.tokenizer, end_of_text=text.end_of_text, path=path)
    _validate_tokenizer(tokenizer, model)
    at_most = min(text.sequence_length, model.context_length)
    encoded = [tokenizer.encode_whole(one, at_most) for one in texts_of(given, model)]
    cut = sum(was_cut for _, was_cut in encoded)
    if cut:
        report(
            f"{cut} of {len(encoded)} texts are longer than {at_most} tokens "
            "(TextData.sequence_length) and were truncated"
        )
    length = max((len(ids) for ids, _ in encoded), default=0)
    rows = [row_of(ids, length) for ids, _ in encoded]
    for begin in range(0, len(rows), AT_ONCE):
        part = rows[begin : begin + AT_ONCE]
        # The last batch is padded: one program serves all.
        missing = 0 if begin == 0 else AT_ONCE - len(part)
        found = vectors(stack([*part, *[part[-1]] * missing]))
        for name, vector in zip(given[begin:], found[: len(part)], strict=False):
            yield Embedding(str(name), vector)


def _validate_tokenizer(tokenizer: Tokenizer, model: TokenModel) -> None:
    if tokenizer.vocab_size > model.vocab_size:
        name = type(model).__name__
        raise UserError(
            f"predict: TextData.tokenizer has {tokenizer.vocab_size} tokens, more than "
            f"{name}.vocab_size={model.vocab_size}; use the one that the model was trained with"
        )


MASK = "[MASK]"


def fill_masks(
    given: Sequence[Any], model: TokenModel, tokenizer: Tokenizer
) -> tuple[list[Batch], list[str], list[tuple[int, int]]]:
    """Return a row per text, each masked token's name, and its row and position there.

    Args:
      given: texts, or .txt files with one in each.
      model: the model's settings.
      tokenizer: of the run.

    Raises:
      UserError: a text has no masked token, or is longer than the model's context.
    """
    mask = _mask(model, tokenizer)
    texts, called, positions = list[list[int]](), list[str](), list[tuple[int, int]]()
    for text in texts_of(given, model):
        first, *others = (tokenizer.encode(piece) for piece in text.split(MASK))
        ids, of_text = [*tokenizer.before, *first], list[int]()
        for piece in others:
            of_text.append(len(ids))
            ids += [mask, *piece]
        ids += tokenizer.after
        if not of_text:
            raise UserError(
                f"predict: {type(model).__name__} predicts masked tokens; write {MASK} where one "
                f"is, such as 'the {MASK} sat'"
            )
        if len(ids) > model.context_length:
            raise UserError(
                f"predict: a text has {len(ids)} tokens, more than "
                f"{type(model).__name__}.context_length={model.context_length}; give a shorter one"
            )
        called += [
            text if len(of_text) == 1 else f"{text}, {MASK} {number}"
            for number in range(1, len(of_text) + 1)
        ]
        positions += [(len(texts), position) for position in of_text]
        texts.append(ids)
    length = max(map(len, texts), default=0)
    return [row_of(ids, length) for ids in texts], called, positions


def token_names(model: TokenModel, tokenizer: Tokenizer) -> list[str]:
    """Return every token of the vocabulary as it is printed: its text in quotes, which show
    spaces."""
    has = range(min(tokenizer.vocab_size, model.vocab_size))
    none = range(len(has), model.vocab_size)
    return [repr(tokenizer.decode([id_])) for id_ in has] + [f"token {id_}" for id_ in none]


def _mask(model: TokenModel, tokenizer: Tokenizer) -> int:
    """Return the last token, as in training; of an imported model, which has no row next to its
    tokenizer's tokens, the one that the tokenizer names."""
    if tokenizer.vocab_size < model.vocab_size:
        return model.vocab_size - 1
    for name in (MASK, "<mask>"):
        try:
            return tokenizer.token("the mask's token", name)
        except UserError:
            continue
    raise UserError(
        f"predict: {type(model).__name__}.vocab_size={model.vocab_size} has no token after the "
        f"tokenizer's, and the tokenizer has no {MASK} and no <mask>: there are no masks to predict"
    )
