"""The first training batch as text, and as a figure: document lengths, tokens, images."""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtrain.config.errors import UserError
from jaxtrain.data.bad_records import BadRecords
from jaxtrain.data.batch import Batch
from jaxtrain.data.loader import batches
from jaxtrain.data.source import Dataset, HasDocuments
from jaxtrain.data.tokenization.tokenizer import Tokenizer
from jaxtrain.training.settings import Train

if TYPE_CHECKING:
    from jaxtrain.run.show.figures import Picture  # Matplotlib takes a second to load

CHARACTERS = 400  # of an example's text
TOKENS = 20  # of one without a tokenizer
WIDTH = 64  # characters of a row diagram
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
STATISTICS_ROWS = 256  # of the first batch, of which tokens are counted
SHEET_IMAGES = 64  # of the first batch, which are drawn
MOST = 10  # of the commonest tokens


def first_batch(train: Train, dataset: Dataset, rows: int, report: Callable[[str], None]) -> Batch:
    """Return the first rows of the first step's batch, in order and augmented.

    Raises:
      BadRecordError: more of them than Train.bad_records allows cannot be read.
    """
    stream = batches(
        dataset.train,
        global_batch_size=train.global_batch_size,
        seed=train.seed,
        rows=np.arange(min(rows, train.global_batch_size)),
        threads=0,
        bad_records=BadRecords(train.bad_records, lambda record: report(f"{record}: left out")),
        order=dataset.mixing or dataset.by_length,
    )
    return next(stream)


def show_examples(
    batch: Batch, dataset: Dataset, count: int, report: Callable[[str], None]
) -> None:
    """Print the first `count` rows of a batch: text by its documents, with the row drawn."""
    for row in range(min(count, len(batch.inputs))):
        example = Batch(*(None if leaf is None else leaf[row] for leaf in vars(batch).values()))
        if dataset.unit in ("images", "vectors"):
            report(f"Example {row + 1}: {_numbers(example, dataset)}")
            continue
        if dataset.unit == "pairs":
            given: Any = example.source
            source = _text(_real(given, example.source_segment_ids), dataset.tokenizer)
            target = _text(_real(example.targets, example.segment_ids), dataset.tokenizer)
            report(f"Example {row + 1}: {source!r} -> {target!r}")
            continue
        report(f"Example {row + 1}: {_tokens(example)}")
        for line in draw_row(example):
            report(line)
        for line in _texts(example, dataset.tokenizer):
            report(line)


def show_tokens(batch: Batch, dataset: Dataset, report: Callable[[str], None]) -> None:
    """Print statistics of a batch of text: padding, documents per row, its commonest tokens."""
    ids, tokenizer = _real(batch.inputs, batch.segment_ids), dataset.tokenizer
    size, counted = batch.inputs.size, float((batch.loss_mask > 0).mean())
    fractions = [
        f"{size:,} tokens in {len(batch.inputs):,} rows",
        f"{1 - len(ids) / size:.1%} padding",
        f"{counted:.1%} of the targets count",
    ]
    if batch.segment_ids is not None:
        fractions.append(f"{batch.segment_ids.max(axis=1).mean():.2f} documents a row")
    if tokenizer is not None:
        characters = len(tokenizer.decode(ids.tolist()))
        fractions.append(f"{characters / max(1, len(ids)):.2f} characters a token")
    found, counts = np.unique(ids, return_counts=True)
    known = dataset.facts.get("vocab_size")  # user-provided data may lack it
    fractions.append(f"{len(found):,} {'' if known is None else f'of {known:,} '}tokens occur")
    report(f"The first batch: {', '.join(fractions)}")
    most = np.argsort(-counts, kind="stable")[:MOST]
    names = [
        (repr(tokenizer.decode([int(found[token])])) if tokenizer else str(found[token]))
        + f" {counts[token] / len(ids):.1%}"
        for token in most.tolist()
    ]
    report(f"The commonest: {', '.join(names)}")


def draw_row(example: Batch) -> list[str]:
    """Return a row of text in lines of at most WIDTH signs, of some tokens each.

    A letter for each document, a dot for padding; '#' where targets count, '+' where some of a
    character's do. Rows without documents, all of whose targets count, are not drawn.
    """
    length = len(example.inputs)
    each = -(-length // WIDTH)
    parts = range(0, length, each)
    counts = [example.loss_mask[begin : begin + each] > 0 for begin in parts]
    mask = "".join("#" if part.all() else "+" if part.any() else "." for part in counts)
    if example.segment_ids is None:
        return [] if set(mask) == {"#"} else [f"  counts     {mask}"]
    firsts = example.segment_ids[::each].tolist()
    letters = "".join("." if not one else LETTERS[(one - 1) % len(LETTERS)] for one in firsts)
    note = "" if each == 1 else f"  ({each} tokens a sign)"
    return [f"  documents  {letters}{note}", f"  counts     {mask}"]


def _numbers(example: Batch, dataset: Dataset) -> str:
    numbers, what = example.inputs, "pixels" if dataset.unit == "images" else "numbers"
    size, targets = " x ".join(map(str, numbers.shape)), example.targets
    if example.positions is not None:  # a sequence: without padding, and labels where they count
        numbers, targets = numbers[example.segment_ids > 0], targets[example.loss_mask > 0]
        size = " x ".join(map(str, numbers.shape))
    return (
        f"{_format_targets(targets, dataset.facts)}, {size} {what} from {numbers.min():.3g} to "
        f"{numbers.max():.3g}, mean {numbers.mean():.3g}, standard deviation {numbers.std():.3g}"
    )


def _format_targets(targets: np.ndarray, facts: Mapping[str, Any]) -> str:
    if not np.issubdtype(targets.dtype, np.integer):
        return "targets " + " ".join(f"{number:.3g}" for number in targets)
    names = str(facts["class_names"]).split(", ") if "class_names" in facts else []
    lines = [
        f"label {label}" + (f" ({names[label]})" if label < len(names) else "")
        for label in np.ravel(targets).tolist()
    ]
    return " and ".join(lines)


def _tokens(example: Batch) -> str:
    counted, length = int((example.loss_mask > 0).sum()), len(example.inputs)
    line = f"{length} tokens, {counted} targets with weight"
    if example.segment_ids is None:
        return line
    documents = len(np.unique(example.segment_ids[example.segment_ids > 0]))
    return f"{line}, of {documents} document{'s' * (documents > 1)}"


def _texts(example: Batch, tokenizer: Tokenizer | None) -> list[str]:
    """Return the text of a row; with several documents, each below a header line."""
    ids, segments = example.inputs, example.segment_ids
    if tokenizer is None or segments is None or segments.max() <= 1:
        return [_text(_real(ids, segments), tokenizer)]
    lines, remaining = list[str](), CHARACTERS
    for number in range(1, int(segments.max()) + 1):
        (indices,) = np.nonzero(segments == number)
        letter = LETTERS[(number - 1) % len(LETTERS)]
        first = (
            ""
            if example.positions is None
            else f", from its token {_first_position(example, indices)}"
        )
        lines.append(f"--- {letter}: tokens {indices[0]} to {indices[-1]}{first}")
        if remaining <= 0:
            continue
        lines.append(_text(ids[indices], tokenizer, remaining))
        remaining -= len(lines[-1])
    return lines


def _first_position(example: Batch, positions: np.ndarray) -> int:
    assert example.positions is not None
    return int(example.positions[positions[0]])


def _real(ids: np.ndarray, segment_ids: np.ndarray | None) -> np.ndarray:
    """Return the tokens that are not padding."""
    return ids.reshape(-1) if segment_ids is None else ids[segment_ids > 0]


def _text(ids: np.ndarray, tokenizer: Tokenizer | None, most: int = CHARACTERS) -> str:
    if tokenizer is None:
        shown = " ".join(map(str, ids[:TOKENS].tolist()))
        return shown + " ..." * (len(ids) > TOKENS)
    text = tokenizer.decode(ids.tolist())
    return text[:most] + " ..." * (len(text) > most)


_BARS = 40


_BLUE = "#5b9bd5"


def data_picture(batch: Batch, dataset: Dataset) -> "Picture":
    """Draw a figure of a batch and its data.

    Args:
      batch: rows of the first step.
      dataset: the opened data.

    Raises:
      UserError: the data are vectors or pairs.
    """
    if dataset.unit == "images":
        return _sheet(batch, dataset)
    if dataset.unit in ("vectors", "pairs"):
        raise UserError(f"--png: {dataset.unit} are not drawn; leave it out")
    return _text_statistics(batch, dataset)


def _text_statistics(batch: Batch, dataset: Dataset) -> "Picture":
    """Plot document lengths and token frequencies side by side."""
    from jaxtrain.run.show.figures import Picture

    figure = Picture(9, 4)
    lengths, counts = figure.subplots(1, 2)
    if isinstance(dataset.train, HasDocuments):
        sizes = np.asarray(dataset.train.document_lengths())
        bounds = np.unique(np.geomspace(1, max(2, sizes.max() + 1), _BARS).round())
        lengths.hist(sizes, bins=bounds.tolist(), color=_BLUE)
        lengths.set_title(
            f"{len(sizes):,} documents, median {np.median(sizes):,.0f}, longest {sizes.max():,}"
        )
    length = batch.inputs.shape[1]
    lengths.axvline(length, color="black", linestyle="--", label=f"a row: {length:,}")
    lengths.set_xscale("log")
    lengths.set_xlabel("tokens of a document")
    lengths.set_ylabel("documents")
    lengths.legend(frameon=False)
    real = batch.inputs if batch.segment_ids is None else batch.inputs[batch.segment_ids > 0]
    often = np.sort(np.unique(real, return_counts=True)[1])[::-1]
    counts.loglog(np.arange(1, len(often) + 1), often, color=_BLUE)
    counts.set_title(f"{real.size:,} tokens of the first batch")
    counts.set_xlabel("rank of a token")
    counts.set_ylabel("how often it occurs")
    return figure


def _labels(labels: np.ndarray, shares: np.ndarray, names: list[str]) -> str:
    """Return an image's label; for a mixed one each label with its weight."""
    labelled = [names[one] if one < len(names) else str(one) for one in np.ravel(labels).tolist()]
    if len(labelled) == 1:
        return labelled[0]
    parts = zip(labelled, np.ravel(shares).tolist(), strict=True)
    return ", ".join(f"{name} {share:.0%}" for name, share in parts if share)


def _sheet(batch: Batch, dataset: Dataset) -> "Picture":
    """Draw images in rows, each over its label, scaled from minimum to maximum."""
    from jaxtrain.run.show.figures import Picture

    images = np.asarray(batch.inputs[:SHEET_IMAGES], np.float32)
    least, most = float(images.min()), float(images.max())
    images = (images - least) / max(most - least, 1e-9)
    facts = dataset.facts
    names = str(facts["class_names"]).split(", ") if "class_names" in facts else []
    columns = math.ceil(math.sqrt(len(images)))
    figure = Picture(columns, 1.25 * math.ceil(len(images) / columns))
    grid = figure.subplots(math.ceil(len(images) / columns), columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for row, (axes, image) in enumerate(zip(grid.flat, images, strict=False)):
        axes.imshow(image.squeeze(), cmap="grey" if image.shape[-1] == 1 else None, vmin=0, vmax=1)
        if np.issubdtype(batch.targets.dtype, np.integer):
            axes.set_title(_labels(batch.targets[row], batch.loss_mask[row], names), fontsize=7)
    return figure
