"""The terminal: errors and warnings in one line, quiet libraries, consoles and tables, text that cannot drive it."""

import json
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any

from skipstone.utils.processor_watch import ProcessorWatch, busy_warning

USER_ERROR, DEFECT, INTERRUPTED = 2, 1, 130
MAX_MESSAGE_CHARACTERS = 400  # libraries wrap whole tables into their messages


def one_line(text: object) -> str:
    """Text without line breaks, cut after 400 characters."""
    line = " ".join(str(text).split())
    return line if len(line) <= MAX_MESSAGE_CHARACTERS else line[: MAX_MESSAGE_CHARACTERS - 3] + "..."


def process_rank() -> int:
    """The number of this process among those that torchrun has started; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def report_error(error: Exception) -> int:
    """Say in one line on stderr what went wrong. Returns the exit code."""
    code = USER_ERROR
    format_usage: Any = getattr(error, "format_message", None)  # typer's usage errors have it
    if format_usage is not None:
        if not format_usage():  # a group without a verb: its help has been printed
            return code
        message = _usage_message(error)
    elif isinstance(error, OSError) and error.strerror and error.filename is not None:
        message = f"{error.filename}: {error.strerror}"
    elif isinstance(error, (ValueError, OSError)) or type(error) is ImportError:  # ours: an extra is missing
        message = str(error) or type(error).__name__
    else:
        code, message = DEFECT, f"{type(error).__name__}: {one_line(error)} (--debug shows where)"
        if isinstance(error, (MemoryError, RuntimeError)):
            from skipstone.engines.host_transfer import out_of_memory

            message = out_of_memory(error) or message
    process = f" (process {process_rank()})" if process_rank() else ""
    print(f"skipstone{process}: {one_line(message)}", file=sys.stderr)
    return code


@contextmanager
def watched_processor() -> Iterator[ProcessorWatch]:
    """Measure inside, and say on stderr if other programs disturbed it."""
    with ProcessorWatch() as watch:
        yield watch
    if (warning := busy_warning(watch.waited_share)) is not None:
        print(warning, file=sys.stderr)


def _usage_message(error: Any) -> str:
    """A usage error and the next step. If the unknown option is a setting of a method, the step is how to give it."""
    message, context = error.format_message(), getattr(error, "ctx", None)
    if context is None:
        return message
    name = (getattr(error, "option_name", None) or "").lstrip("-").replace("-", "_")
    if name and any("--method" in parameter.opts for parameter in context.command.params):
        from skipstone.cli.method_table import known_methods

        known = known_methods()
        owners = [method for method, about in known.items() if name in about.settings or name in about.aliases]
        if owners:
            owner = max(owners, key=lambda method: known[method].lossless)  # the first that keeps the text
            name = known[owner].aliases.get(name, name)
            return f'{message}; settings are part of the method: --method "{owner} {name}=..."'
    return f"{message} (see {context.command_path} --help)"


if TYPE_CHECKING:
    from rich.console import Console

QUIET = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


@contextmanager
def only_first_process_prints() -> Iterator[None]:
    """Inside, only the first of several processes prints. All processes report errors, because those leave the context."""
    if process_rank() == 0:
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Show our own warnings as one line each, and hide those of other libraries. Hugging Face's read the environment when they
    are imported, so nothing may import them before."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", module=r"skipstone(\.|$)")
        warnings.showwarning = _show_warning
        yield


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"skipstone: warning: {one_line(message)}", file=sys.stderr)


def print_json(document: Any, indent: int | None = None) -> None:
    """One JSON document on stdout. Characters are escaped if stdout cannot show them."""
    text = json.dumps(document, ensure_ascii=False, indent=indent)
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        text = json.dumps(document, indent=indent)
    print(text)


def replace_unprintable_characters() -> None:
    """Make stdout show "?" for a character that it cannot show, instead of an error."""
    reconfigure: Any = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")


def console(stderr: bool = False, quiet: bool = False) -> "Console":
    """A console for tables. It is made anew each time, because tests replace the streams. quiet: it prints nothing."""
    from rich.console import Console

    made = Console(stderr=stderr, quiet=quiet, highlight=False, markup=False)
    if not made.is_terminal:
        made.width = 120  # rich assumes 80 columns if it cannot ask
    return made


def print_table(titles: Sequence[str], rows: Iterable[Sequence[object]], has_rules: bool = False) -> None:
    """A table on stdout. has_rules: for texts; a table of figures has no rules between its rows and is aligned at the right."""
    from rich import box
    from rich.table import Column, Table

    figures: dict[str, Any] = {"box": box.SIMPLE_HEAD, "padding": (0, 1), "pad_edge": False}
    table = Table(*titles) if has_rules else Table(*(Column(title, justify="right") for title in titles), **figures)
    for row in rows:
        table.add_row(*map(str, row))
    console().print(table)


_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_PICTURES |= dict.fromkeys(range(128, 160), 65533)


def harmless(text: str) -> str:
    """A model's text for a terminal. Control characters become pictures, so that no output can drive the terminal."""
    return text.translate(_PICTURES)
