"""A matplotlib figure as HTML with words for those who do not see it."""

from __future__ import annotations

import base64
import io
from html import escape
from typing import Any


def figure_png(figure: Any, dpi: int = 130) -> bytes:
    """The figure as PNG, drawn without pyplot and without touching its state."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def image_html(figure: Any, alt: str) -> str:
    """``<img alt=…>`` at the figure's own width or the page's, whichever is less."""
    data = base64.b64encode(figure_png(figure)).decode()
    width = round(figure.get_figwidth() * 100)
    return (
        f'<img alt="{escape(alt, quote=True)}" src="data:image/png;base64,{data}" '
        f'style="width:{width}px;max-width:100%;height:auto;background:white">'
    )
