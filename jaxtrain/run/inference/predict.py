"""Batch inference on images, texts, tokens and feature vectors (`jaxtrain predict`)."""

import dataclasses
import functools
import io
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from jaxtrain.config.buckets import AnyPath, BucketPath
from jaxtrain.config.errors import UserError
from jaxtrain.data.batch import Batch, stack
from jaxtrain.data.images.source import ImageData
from jaxtrain.data.images.stores import IMAGE_SUFFIXES, decode
from jaxtrain.data.pairs.classed import LabelledText, TaggedText
from jaxtrain.data.source import existing_path, walk_files
from jaxtrain.data.vectors.sequences import SequenceData
from jaxtrain.data.vectors.sequences import read as read_sequences
from jaxtrain.data.vectors.source import VectorData
from jaxtrain.models.model import (
    ImageModel,
    Model,
    TokenModel,
    VectorModel,
    pooling_of,
    reads_images,
    reads_pairs,
    reads_tokens,
    reads_vectors,
    token_classes_of,
)
from jaxtrain.run.generation.decoding import Sampling
from jaxtrain.run.inference.inputs import AT_ONCE, GeneratedText, texts_of, vectors_of
from jaxtrain.run.inference.outputs import (
    Embedding,
    RegressionOutput,
    embed_texts,
    embeddings,
    fill_masks,
    predict_vectors,
    regression_outputs,
    token_names,
)
from jaxtrain.training.objectives.classification import TokenClassification
from jaxtrain.training.objectives.objective import Objective
from jaxtrain.training.objectives.regression import Reconstruction, Regression

if TYPE_CHECKING:
    from jaxtrain.run.trainer import Trainer
from jaxtrain.training.settings import TextSource

Given = str | Path | Image.Image | np.ndarray
Inputs = Sequence[Given] | Given

# Called with the error of an unreadable input, which is then skipped; None raises it.
Skip = Callable[[UserError], object] | None


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Prediction for one image, text, word or vector.

    Attributes:
      name: the file, the text or word itself, or "image 1" and the like of one in memory.
      classes: the likeliest classes and their probabilities, likeliest first.
    """

    name: str
    classes: tuple[tuple[str, float], ...]

    @property
    def label(self) -> str:
        """The likeliest class."""
        return self.classes[0][0]

    def __str__(self) -> str:
        classes = ", ".join(f"{name} ({probability:.1%})" for name, probability in self.classes)
        return f"{self.name}: {classes}"


# For one input.
Output = Prediction | Embedding | RegressionOutput | GeneratedText


@dataclasses.dataclass(frozen=True)
class Predictor:
    """Functions from prepared inputs to a model's outputs, on the host.

    Attributes:
      logits: as of `Trainer.logits`.
      embeddings: of a batch of texts, [B, D].
      numbers: vectors [N, D] -> the outputs of a regression model, [N, K].
      write: the likeliest continuations of texts, or their targets.
    """

    logits: Callable[[Any], np.ndarray]
    embeddings: Callable[[Batch], np.ndarray]
    numbers: Callable[[np.ndarray], np.ndarray]
    write: Callable[[list[str]], list[str]]


@dataclasses.dataclass(frozen=True)
class _Request:
    """Examples to classify.

    Attributes:
      called: the name of each.
      logits: of the examples with these indices, [N, C].
      names: of the classes; raises UserError if the data with them cannot be opened.
      classes: number of classes.
      broken: indices of unreadable ones, among those requested so far.
    """

    called: list[str]
    logits: Callable[[Sequence[int]], np.ndarray]
    names: Callable[[], list[str]]
    classes: int
    broken: Collection[int] = ()


def predict_with(
    trainer: "Trainer", inputs: Inputs, *, top: int | None = None, skip: Skip = None
) -> list[Output]:
    """Predict with a trainer's model; arguments as in `Trainer.predict`."""
    model, data = trainer.config.train.model, trainer.config.train.data
    program, state = trainer.program.setup, trainer.program.eval_state(trainer.state)

    def write(texts: list[str]) -> list[str]:
        found = trainer.answers(texts, sampling=Sampling(temperature=0.0))
        return [answer.text or "" for answer in found]

    vectors = functools.partial(embeddings, program, model, state)
    predictor = Predictor(
        trainer.logits, vectors, functools.partial(regression_outputs, program, state), write
    )
    ask = functools.partial(predict, inputs, model, data, predictor, objective=program.objective)
    return list(ask(top=top, report=trainer.report, skip=skip))


def predict(
    inputs: Inputs,
    model: Model,
    data: object,
    predictor: Predictor,
    *,
    objective: Objective,
    top: int | None,
    report: Callable[[str], object],
    skip: Skip = None,
) -> Iterator[Output]:
    """Yield a prediction for each input, prepared as in evaluation.

    For an image, a text, a vector, a sequence of vectors or each word of tagged texts the
    likeliest classes; for each masked token of a text the likeliest tokens; the regression outputs
    of a vector; the likeliest continuation of a text, or its target; a text's embedding. For a
    sequence whose positions have classes it is that of the position that
    `SequenceData.pooling` names.

    Args:
      inputs: PNG or JPEG files, folders of them at any depth, or images of Pillow's; texts, or
        .txt files with one in each; .npz or .csv files of vectors, or arrays of them; .npz or .ts
        files of sequences of vectors, or an array [T, F] for each.
      model: the model's settings.
      data: the training data: preprocessing, and the names of the classes.
      predictor: the model's outputs of prepared inputs.
      objective: its training objective.
      top: maximum number of classes; None: 3.
      report: called with a line if class names are unknown, and if texts are truncated.
      skip: called with the error of an unreadable input; None raises it.

    Raises:
      UserError: a file is missing or of another kind than the model's inputs, and there is no
        `skip`.
    """
    given = [inputs] if isinstance(inputs, Given) else list(inputs)
    if skip is not None and not reads_images(model):
        given = _readable(given, model, data, skip)
        if not given:
            return iter(())
    name, looks_back = type(model).__name__, reads_tokens(model) and bool(model.cached)
    if reads_tokens(model) and pooling_of(model) is not None:
        instead = "makes embeddings"
        found = embed_texts(given, model, data, predictor.embeddings, report=report)
    elif isinstance(objective, Regression):
        instead, again = "predicts numbers", isinstance(objective, Reconstruction)
        found = predict_vectors(given, model, data, predictor.numbers, again=again)
    elif reads_pairs(model) or (looks_back and not isinstance(objective, TokenClassification)):
        instead, found = "writes text", _write_texts(given, model, predictor.write)
    else:
        return _classes(
            given, model, data, predictor.logits, 3 if top is None else top, report, skip
        )
    if top is not None:
        raise UserError(f"--top {top}: {name} {instead} and predicts no classes; leave it out")
    return found


def _write_texts(
    given: list[Given], model: Model, write: Callable[[list[str]], list[str]]
) -> Iterator[GeneratedText]:
    """Yield the completion or the target of each text."""
    texts = list(texts_of(given, model))
    yield from map(GeneratedText, map(str, given), write(texts))


def _classes(
    given: list[Given],
    model: Model,
    data: object,
    logits: Callable[[Any], np.ndarray],
    top: int,
    report: Callable[[str], object],
    skip: Skip,
) -> Iterator[Prediction]:
    """Yield the likeliest classes."""
    classes = token_classes_of(model)
    if reads_images(model) and isinstance(data, ImageData):
        logits_of_parts = _of_images(given, model, data, logits, skip)
    elif classes is not None and isinstance(data, LabelledText):
        logits_of_parts = _of_texts(given, model, data, logits, classes)
    elif classes is not None and isinstance(data, TaggedText):
        logits_of_parts = _of_words(given, model, data, logits, classes)
    elif classes is not None and isinstance(data, SequenceData):
        logits_of_parts = _of_sequences(given, model, data, logits, classes)
    elif reads_vectors(model) and isinstance(data, VectorData):
        logits_of_parts = _of_vectors(given, model, data, logits)
    elif reads_tokens(model) and isinstance(data, TextSource):
        logits_of_parts = _of_hidden(given, model, data, logits)
    else:
        raise UserError(
            f"predict: Train.data=@{type(data).__name__}() does not say how what "
            f"{type(model).__name__} reads is prepared; Trainer.logits takes prepared inputs"
        )
    if top < 1:
        raise UserError(f"--top {top}: name at least 1 class")
    try:
        names = logits_of_parts.names()
    except UserError as error:
        names = [str(number) for number in range(logits_of_parts.classes)]
        report(f"Classes are printed by number, since the data cannot be opened: {error}")
    for begin in range(0, len(logits_of_parts.called), AT_ONCE):
        part = range(begin, min(begin + AT_ONCE, len(logits_of_parts.called)))
        # The last batch is padded: one program serves all.
        missing = 0 if begin == 0 else AT_ONCE - len(part)
        found = logits_of_parts.logits([*part, *[part[-1]] * missing])
        for number, row in zip(part, found, strict=False):
            if number in logits_of_parts.broken:
                continue
            likely = np.exp(row - row.max())
            likely /= likely.sum()
            order = np.argsort(-likely, kind="stable")[:top]
            ranked = tuple((names[label], float(likely[label])) for label in order)
            yield Prediction(logits_of_parts.called[number], ranked)


def _of_images(
    given: list[Given],
    model: ImageModel,
    data: ImageData,
    logits: Callable[[Any], np.ndarray],
    skip: Skip,
) -> _Request:
    # All are checked before the first batch.
    images, broken = list[AnyPath | Image.Image](), set[int]()
    for source in given:
        try:
            images += _images(source)
        except UserError as error:
            if skip is None:
                raise
            skip(error)
    if not images and skip is None:
        raise UserError("predict: there is no image; name PNG or JPEG files, or folders of them")

    def prepare(number: int) -> np.ndarray:
        try:
            return data.prepare(_read(images[number]), None)
        except UserError as error:
            if skip is None:
                raise
            if number not in broken:
                broken.add(number)
                skip(error)
            return np.zeros(data.image_shape, np.float32)

    def of(numbers: Sequence[int]) -> np.ndarray:
        return logits(np.stack([prepare(number) for number in numbers]))

    called = [
        f"image {number}" if isinstance(image, Image.Image) else str(image)
        for number, image in enumerate(images, start=1)
    ]
    return _Request(called, of, data.class_names, model.num_classes, broken)


def _readable(
    given: list[Given], model: Model, data: object, skip: Callable[[UserError], object]
) -> list[Given]:
    """Return the inputs that can be read, each tried alone."""
    found = []
    for source in given:
        try:
            if isinstance(data, SequenceData):
                _sequences(source, model, data, 0)
            elif reads_vectors(model):
                vectors_of([source], model)
            else:
                list(texts_of([source], model))
        except UserError as error:
            skip(error)
        else:
            found.append(source)
    return found


def _of_texts(
    given: list[Given],
    model: Model,
    data: LabelledText,
    logits: Callable[[Any], np.ndarray],
    classes: int,
) -> _Request:
    tokenizer = data.open_tokenizer()
    rows = [data.row(tokenizer.encode(text)) for text in texts_of(given, model)]
    called = [str(source) for source in given]
    return _Request(called, _logits_of_labels(rows, logits), data.class_names, classes)


def _of_words(
    given: list[Given],
    model: Model,
    data: TaggedText,
    logits: Callable[[Any], np.ndarray],
    classes: int,
) -> _Request:
    """Return a request for every word of every text."""
    tokenizer, called = data.open_tokenizer(), list[str]()
    rows, positions = list[Batch](), list[tuple[int, int]]()
    for number, text in enumerate(texts_of(given, model)):
        words = text.split()
        tokens, of_words = data.tokens_of(words, tokenizer)
        for word, position in zip(words, of_words, strict=True):
            at = None if position is None else position + len(data.around[0])
            if position is None or at is None or position >= data.room:
                raise UserError(
                    f"predict: the word {word!r} of text {number + 1} "
                    + (
                        "has no token"
                        if at is None
                        else f"is behind {data.section}.sequence_"
                        f"length={data.sequence_length} tokens; give shorter texts"
                    )
                )
            positions.append((number, at))
            called.append(word if len(given) == 1 else f"text {number + 1}, {word}")
        rows.append(data.row(tokens))
    logits_BTC = np.concatenate(
        [logits(stack(rows[begin : begin + AT_ONCE])) for begin in range(0, len(rows), AT_ONCE)]
    )

    def of(numbers: Sequence[int]) -> np.ndarray:
        return np.stack([logits_BTC[positions[number]] for number in numbers])

    return _Request(called, of, data.class_names, classes)


def _of_hidden(
    given: list[Given], model: TokenModel, data: TextSource, logits: Callable[[Any], np.ndarray]
) -> _Request:
    """Return a request for every masked token of every text; classes are tokens."""
    tokenizer = data.open_tokenizer()
    rows, called, masked = fill_masks(given, model, tokenizer)

    def of(numbers: Sequence[int]) -> np.ndarray:
        positions = [masked[number] for number in numbers]
        logits_BTV = logits(stack([rows[row] for row, _ in positions]))
        return logits_BTV[np.arange(len(positions)), [position for _, position in positions]]

    return _Request(called, of, lambda: token_names(model, tokenizer), model.vocab_size)


def _of_vectors(
    given: list[Given], model: VectorModel, data: VectorData, logits: Callable[[Any], np.ndarray]
) -> _Request:
    called, table = vectors_of(given, model)
    vectors = data.prepare(table)

    def names() -> list[str]:
        return [str(label) for label in range(model.outputs)]

    return _Request(called, lambda numbers: logits(vectors[list(numbers)]), names, model.outputs)


def _of_sequences(
    given: list[Given],
    model: Model,
    data: SequenceData,
    logits: Callable[[Any], np.ndarray],
    classes: int,
) -> _Request:
    called, found = list[str](), list[np.ndarray]()
    for source in given:
        names, sequences = _sequences(source, model, data, len(called))
        called += names
        found += sequences
    rows = data.prepare(found)
    return _Request(called, _logits_of_labels(rows, logits), data.class_names, classes)


def _sequences(
    source: Given, model: Model, data: SequenceData, before: int
) -> tuple[list[str], Sequence[np.ndarray]]:
    """Return names of the sequences of an input, counted from `before`, and each [T, F]."""
    if isinstance(source, Image.Image):
        raise UserError(f"predict: {type(model).__name__} reads vectors, not images")
    if isinstance(source, np.ndarray):
        name, sequences = "sequence", [source.reshape(len(source), -1)]
    else:
        path = existing_path("predict INPUT", str(source))
        origin, name = f"predict INPUT = {str(path)!r}", str(path)
        sequences = read_sequences(path, origin, labelled=False).x
    features = sequences[0].shape[1]
    if features != data.features:
        raise UserError(
            f"predict: {name} has vectors of {features} numbers; {type(model).__name__} reads "
            f"{data.features}"
        )
    return [f"{name} {before + number}" for number in range(1, len(sequences) + 1)], sequences


def _logits_of_labels(
    rows: list[Batch], logits: Callable[[Any], np.ndarray]
) -> Callable[[Sequence[int]], np.ndarray]:
    """Return the logits [N, C] of rows, at the position of each whose class is predicted."""

    def of(numbers: Sequence[int]) -> np.ndarray:
        batch = stack([rows[number] for number in numbers])
        logits_BTC = logits(batch)
        return logits_BTC[np.arange(len(logits_BTC)), batch.loss_mask.argmax(-1)]

    return of


def _images(source: Given) -> Iterator[AnyPath | Image.Image]:
    """Yield the images of an input, none of them read yet."""
    if isinstance(source, np.ndarray):
        raise UserError("predict: an array is not an image; give files, or images of Pillow's")
    if isinstance(source, Image.Image):
        yield source
        return
    path = existing_path("predict INPUT", str(source))
    if not path.is_dir():
        yield path
        return
    files = [file for file, *_ in walk_files(path, "predict INPUT")]
    found = [file for file in files if file.suffix.lower() in IMAGE_SUFFIXES]
    if not found:
        raise UserError(f"predict INPUT = {str(path)!r}: there is no PNG or JPEG file in it")
    yield from found


def _read(image: AnyPath | Image.Image) -> Image.Image:
    if isinstance(image, Image.Image):
        return image
    file = io.BytesIO(image.read_bytes()) if isinstance(image, BucketPath) else image
    return decode(file, "predict INPUT", str(image))
