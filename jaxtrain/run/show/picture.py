"""Figures for files and notebooks.

Matplotlib takes a second to load: this module is imported where something is drawn.
"""

import io

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


class Picture(Figure):
    """A figure that notebooks show by themselves.

    Not pyplot's: those are global state, and drawing may happen beside the training thread.
    Without pyplot IPython does not know how to show a figure, so this class does it itself.
    """

    def __init__(self, width: float, height: float) -> None:
        """An empty figure; width and height in inches, of 120 dots each."""
        super().__init__(figsize=(width, height), dpi=120, layout="constrained")
        FigureCanvasAgg(self)

    def png(self) -> bytes:
        """The bytes of a PNG file."""
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()

    def _repr_png_(self) -> bytes:
        return self.png()
