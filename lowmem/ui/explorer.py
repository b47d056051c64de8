"""A menu of layers over the picture of a second moment."""

from __future__ import annotations

from collections.abc import Mapping

import ipywidgets
from torch import Tensor

from lowmem.ui.second_moment import second_moment_picture
from lowmem.ui.widgets import _Widget


class SecondMomentExplorer(_Widget):
    """``layer`` chooses; ``result`` is the picture that is shown."""

    def __init__(self, moments: Mapping[str, Tensor]) -> None:
        self.moments = dict(moments)
        self.layer = ipywidgets.Dropdown(
            options=list(self.moments),
            description="Layer",
            style={"description_width": "60px"},
            layout={"width": "420px"},
        )
        super().__init__(None)
        self.box = ipywidgets.VBox([self.layer, self.error])
        self.layer.observe(lambda _: self.update(), names="value")
        self.update()

    def update(self) -> None:
        """Draw the layer that the menu names."""
        name = self.layer.value
        try:
            self.result = second_moment_picture(self.moments[name], name)
        except ValueError as error:
            self._say(f"{name}: {error}")
            return
        self._say("")
        self._show(self.result._repr_html_())
