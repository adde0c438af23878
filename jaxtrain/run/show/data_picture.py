"""Figure of training data: document lengths and token frequencies, or images.

Imported where something is drawn: matplotlib takes a second to load.
"""

import math

import numpy as np

from jaxtrain.config.errors import UserError
from jaxtrain.data.batch import Batch
from jaxtrain.data.source import Dataset, HasDocuments
from jaxtrain.run.show.examples import SHEET_IMAGES
from jaxtrain.run.show.picture import Picture

_BARS = 40
_BLUE = "#5b9bd5"


def data_picture(batch: Batch, dataset: Dataset) -> Picture:
    """A picture of a batch and of the data that it is of.

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
    return _text(batch, dataset)


def _text(batch: Batch, dataset: Dataset) -> Picture:
    """Beside each other: how long documents are, and how often each token occurs."""
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
    """What an image shows; of a mixed one each label with its share."""
    told = [names[one] if one < len(names) else str(one) for one in np.ravel(labels).tolist()]
    if len(told) == 1:
        return told[0]
    parts = zip(told, np.ravel(shares).tolist(), strict=True)
    return ", ".join(f"{name} {share:.0%}" for name, share in parts if share)


def _sheet(batch: Batch, dataset: Dataset) -> Picture:
    """Images in rows, each over its label, their values from the least to the greatest."""
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
