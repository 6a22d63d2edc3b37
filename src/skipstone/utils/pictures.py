"""Pictures by matplotlib, which is imported only for them."""

import io
from typing import Any

from skipstone.utils.extras import installed


def new_figure(size: tuple[float, float], rows: int = 1, columns: int = 1, **options: Any) -> tuple[Any, Any]:
    """A matplotlib figure and its axes. size: width and height in inches. ImportError without matplotlib."""
    figure = installed("matplotlib.figure", "pictures need matplotlib").Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def image_of(figure: Any, form: str = "png") -> bytes:
    """The content of an image file."""
    data = io.BytesIO()
    figure.savefig(data, format=form, dpi=120)
    return data.getvalue()
