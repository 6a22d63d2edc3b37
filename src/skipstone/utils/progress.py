"""Progress bars on stderr."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def progress_bar(title: str, total: float, announce: bool = False) -> Iterator[Callable[..., None]]:
    """A bar on a terminal, nothing elsewhere and for a total of 0. announce: elsewhere one line at the beginning.

    Yields update(completed, description), to be called after each piece of work. Without `completed` it counts one more piece.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left:"))
    console = Console(stderr=True, highlight=False)
    task: TaskID | None = None
    if announce and total and not console.is_terminal:
        console.print(f"{title}: {total}")
    is_hidden = not console.is_terminal or not total
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=is_hidden) as bar:

        def update(completed: float | None = None, description: str = title) -> None:
            nonlocal task
            if task is None:  # the work of an earlier run says nothing of the speed
                task = bar.add_task(title, total=total, completed=int(completed or 0))
            done: dict[str, Any] = {"advance": 1} if completed is None else {"completed": completed}
            bar.update(task, description=description, **done)

        yield update
