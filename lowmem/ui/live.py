"""Live pictures of a run, in a notebook while it goes on and as a PNG from a script.

In anyone's own loop::

    with Live() as live:                        # 1
        for step in range(1000):                # your loop
            ...
            live.log(step, loss=loss.item())    # 2

The recorder (``live.recorder``) holds the data and knows nothing of the picture; the
panels draw a recorder and know nothing of the run.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from lowmem.ui.panels import HeatMap, Lines, Panel
from lowmem.ui.recorder import Recorder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["HeatMap", "Lines", "Live", "Recorder"]

logger = logging.getLogger(__name__)

# At most two redraws a second; fewer where drawing would take more than a tenth of the time.
_INTERVAL_SECONDS = 0.5
_LARGEST_INTERVAL_SECONDS = 4.0
_DRAWING_SHARE = 0.1


class Live:
    """A picture that follows a run.

    Args:
        panels: ``Lines`` and ``HeatMap`` panels; by default one panel a recorded name.
        title: a line above the picture.
        path: where to write the picture as PNG when the run ends. In a script the default
            is ``live.png``; in a notebook the default is nowhere, the picture stays in its cell.
        recorder: where the data goes; a new one by default.
        columns: panels in a row.

    ``stopped`` tells after the ``with`` block whether Stop (an interrupt) ended it. In a
    notebook the block then ends without a traceback, so that the cell goes on with what
    there is; in a script the interrupt goes on as usual.
    """

    def __init__(
        self,
        panels: Sequence[Panel] | None = None,
        *,
        title: str = "",
        path: str | os.PathLike[str] | None = None,
        recorder: Recorder | None = None,
        columns: int = 2,
    ) -> None:
        if columns < 1:
            raise ValueError(f"columns is {columns}; a picture has at least 1 panel in a row")
        if panels is not None and (isinstance(panels, (str, bytes)) or not list(panels)):
            raise ValueError(f"panels is {panels!r}; give a list of Lines(…) and HeatMap(…)")
        for panel in panels or ():
            if not (hasattr(panel, "draw") and hasattr(panel, "words")):
                raise TypeError(f"panels holds {panel!r}; give Lines(…) and HeatMap(…)")
        self.panels = None if panels is None else list(panels)
        self.title = title
        self.path = path
        self.recorder = Recorder() if recorder is None else recorder
        self.columns = columns
        self.stopped = False
        self.redraws = 0
        self._handle: Any = None
        self._next = 0.0
        self._in_notebook = in_notebook()

    def log(self, step: float, values: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        """Record values at a step (see ``Recorder.log``) and redraw when it is time."""
        self.recorder.log(step, values, **named)
        if self._in_notebook and time.monotonic() >= self._next:
            self.redraw()

    def redraw(self) -> None:
        """Draw now. ``log`` calls this at most twice a second."""
        start = time.monotonic()
        self._show()
        # The first drawing loads matplotlib and says nothing about the next ones.
        took = time.monotonic() - start if self.redraws else 0.0
        pause = min(max(_INTERVAL_SECONDS, took / _DRAWING_SHARE), _LARGEST_INTERVAL_SECONDS)
        self._next = start + pause
        self.redraws += 1

    def close(self) -> None:
        """Draw the final state, and write it where ``path`` says."""
        if self._in_notebook:
            self.redraw()
        path = self.path
        if path is None and not self._in_notebook:
            path = "live.png"
        if path is not None:
            self.save(path)
            logger.info("picture of the run: %s", os.fspath(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture as it is now."""
        self.figure().savefig(path, dpi=130)

    def figure(self) -> Figure:
        """The picture as it is now: a ``matplotlib.figure.Figure`` of its own, no pyplot."""
        from matplotlib.figure import Figure

        panels = self._panels()
        columns = min(self.columns, max(1, len(panels)))
        rows = max(1, math.ceil(len(panels) / columns))
        size = (10, 0.35 * bool(self.title) + 2.7 * rows)
        figure = Figure(figsize=size, dpi=100, layout="constrained", facecolor="white")
        grid = figure.add_gridspec(rows, columns)
        for number, panel in enumerate(panels):
            row, column = divmod(number, columns)
            # The last panel takes what its row leaves free.
            last = number == len(panels) - 1
            place = grid[row, column:] if last else grid[row, column]
            # A figure of its own each, so that one panel's labels take no room from another.
            panel.draw(figure.add_subfigure(place).add_subplot(), self.recorder)
        if self.title:
            figure.suptitle(self.title, x=0.012, ha="left", fontsize=13)
        return figure

    @property
    def alt(self) -> str:
        """The picture in words."""
        said = ". ".join(panel.words(self.recorder) for panel in self._panels())
        return f"{self.title or 'Live picture'}. {said or 'Nothing recorded yet'}."

    def _repr_html_(self) -> str:
        from lowmem.ui.image import image_html

        return image_html(self.figure(), self.alt)

    def __repr__(self) -> str:
        return self.alt

    def __enter__(self) -> Live:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self.stopped = kind is not None and issubclass(kind, KeyboardInterrupt)
        try:
            self.close()
        except Exception:
            if kind is None:
                raise
            logger.exception("the picture could not be drawn")  # the run's own error goes first
        return self.stopped and self._in_notebook

    def _panels(self) -> list[Panel]:
        if self.panels is not None:
            return self.panels
        return [Lines(name, name, smooth=True) for name in self.recorder.names]

    def _show(self) -> None:
        from IPython.display import HTML, display

        picture = HTML(self._repr_html_())
        if self._handle is None:
            self._handle = display(picture, display_id=True)
        else:
            self._handle.update(picture)


def in_notebook() -> bool:
    """True where a kernel shows pictures: Jupyter, Colab, Kaggle, VS Code. Not in a terminal."""
    import sys

    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    return getattr(get_ipython(), "kernel", None) is not None
