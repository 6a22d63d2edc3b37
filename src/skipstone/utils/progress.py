"""Progress on stderr: a bar, and a line for work that is short as a rule."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import TaskID

HIDDEN_SECONDS = 1.0  # of work that shows no line


@contextmanager
def progress_line(title: str, total: float) -> Iterator[Callable[[float], None]]:
    """A percentage on a terminal once the block has taken a second, removed at its end. Nothing elsewhere.

    Yields add(count), to be called after each piece of work, all of which count `total`. It imports nothing.
    """
    began, done, is_shown = time.monotonic(), 0.0, False

    def add(count: float) -> None:
        nonlocal done, is_shown
        done += count
        if sys.stderr.isatty() and time.monotonic() - began > HIDDEN_SECONDS:
            is_shown = True
            print(f"\r{title}: {100 * done / total:.0f} %", end="", file=sys.stderr, flush=True)

    try:
        yield add
    finally:
        if is_shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@contextmanager
def progress_bar(title: str, total: float, announce: bool = False) -> Iterator[Callable[..., None]]:
    """A bar on a terminal, nothing elsewhere and for a total of 0. announce: elsewhere one line at the beginning.

    The bar opens with the first update: until then the block may write other lines of progress.
    Yields update(completed, description), to be called after each piece of work. Without `completed` it counts one more piece.
    """
    from rich.console import Console  # which takes long to import
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left:"))
    console = Console(stderr=True, highlight=False)
    task: TaskID | None = None
    if announce and total and not console.is_terminal:
        console.print(f"{title}: {total}")
    is_hidden = not console.is_terminal or not total
    bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=is_hidden)

    def update(completed: float | None = None, description: str = title) -> None:
        nonlocal task
        if task is None:  # the work of an earlier run says nothing of the speed
            bar.start()
            task = bar.add_task(title, total=total, completed=int(completed or 0))
        done: dict[str, Any] = {"advance": 1} if completed is None else {"completed": completed}
        bar.update(task, description=description, **done)

    try:
        yield update
    finally:
        bar.stop()
