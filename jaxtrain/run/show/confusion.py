"""Figure of a confusion matrix."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from jaxtrain.run.show.picture import Picture

_MOST_WRITTEN = 20  # classes whose numbers have room in their cells
_MOST_LETTERS = 16  # of a class's name


def confusion_figure(counts: Sequence[Sequence[int]], names: Sequence[str] = ()) -> "Picture":
    """Labels down, predictions across; each row's shades are shares of its label.

    Args:
      counts: how often each label (a row) was predicted as each class (a column).
      names: of the classes; numbers where there are not as many names as classes.
    """
    from jaxtrain.run.show.picture import Picture

    table, size = np.asarray(counts), len(counts)
    called = names if len(names) == size else [str(number) for number in range(size)]
    short = [one if len(one) <= _MOST_LETTERS else one[:_MOST_LETTERS] + "…" for one in called]
    shares = table / np.maximum(table.sum(1, keepdims=True), 1)
    side = min(max(0.45 * size + 1.8, 4.0), 14.0)
    figure = Picture(side, side)
    axes = figure.add_subplot()
    axes.imshow(shares, cmap="Greys", vmin=0, vmax=1)
    every = -(-size // 50)  # names that would run into each other are left out
    places = range(0, size, every)
    axes.set_xticks(places, [short[place] for place in places], rotation=90)
    axes.set_yticks(places, [short[place] for place in places])
    axes.set_xlabel("predicted")
    axes.set_ylabel("label")
    if size <= _MOST_WRITTEN:
        for (row, column), count in np.ndenumerate(table):
            if count:
                color = "white" if shares[row, column] > 0.5 else "black"
                style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": "small"}
                axes.text(column, row, str(count), color=color, **style)
    return figure
