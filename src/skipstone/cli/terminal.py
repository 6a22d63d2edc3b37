"""What every verb shares: one line for an error or a warning, quiet libraries, tables on stderr, safe text on stdout."""

import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

USER_ERROR, DEFECT, INTERRUPTED = 2, 1, 130
QUIET = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
LONGEST = 400  # libraries wrap whole tables into their messages


def one_line(text: object) -> str:
    """Text without line breaks, cut where it stops being a sentence."""
    line = " ".join(str(text).split())
    return line if len(line) <= LONGEST else line[: LONGEST - 3] + "..."


def report(error: Exception) -> int:
    """Say what went wrong in one line on stderr. Returns the exit code."""
    code = USER_ERROR
    usage: Any = getattr(error, "format_message", None)  # of a usage error of typer's
    if usage is not None:
        if not usage():  # a group without a verb, whose help has been printed
            return code
        message = _usage(error)
    elif isinstance(error, OSError) and error.strerror and error.filename is not None:
        message = f"{error.filename}: {error.strerror}"
    elif isinstance(error, (ValueError, OSError)) or type(error) is ImportError:  # ours: an extra is missing
        message = str(error) or type(error).__name__
    else:
        code, message = DEFECT, f"{type(error).__name__}: {one_line(error)} (--debug shows where)"
        if isinstance(error, (MemoryError, RuntimeError)):
            from skipstone.engines.host_transfer import out_of_memory

            message = out_of_memory(error) or message
    which = f" (process {process()})" if process() else ""
    print(f"skipstone{which}: {one_line(message)}", file=sys.stderr)
    return code


def _usage(error: Any) -> str:
    """A usage error, and where to look; for a setting of a method, where the verb takes one, how to give it."""
    context = getattr(error, "ctx", None)
    if context is None:
        return error.format_message()
    name = (getattr(error, "option_name", None) or "").lstrip("-").replace("-", "_")
    if name and any("--method" in parameter.opts for parameter in context.command.params):
        from skipstone.cli.method_table import METHODS

        owners = [method for method, about in METHODS.items() if name in about.settings or name in about.aliases]
        if owners:
            owner = max(owners, key=lambda method: METHODS[method].lossless)  # the first of those that keep the text
            name = METHODS[owner].aliases.get(name, name)
            return f'{error.format_message()}; settings are part of the method: --method "{owner} {name}=..."'
    return f"{error.format_message()} (see {context.command_path} --help)"


def process() -> int:
    """The number of this process among those that torchrun has started; 0 where it has started none."""
    return int(os.environ.get("RANK", "0"))


@contextmanager
def first_speaks() -> Iterator[None]:
    """Inside, only the first of several processes says anything. Errors, which leave, are said by all."""
    if process() == 0:
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Our own warnings as one line each, everybody else's not at all."""
    with warnings.catch_warnings(), _quiet_libraries():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", module=r"skipstone(\.|$)")
        warnings.showwarning = _show_warning
        yield


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Hugging Face's libraries log errors only, and draw no progress bars."""
    if "transformers" not in sys.modules:  # it reads these when it is imported, which a mistake in a command does not wait for
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        yield
        return
    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging

    verbosity, hubs, bars = logging.get_verbosity(), hub.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    hub.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        hub.set_verbosity(hubs)
        if bars:
            logging.enable_progress_bar()


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"skipstone: warning: {one_line(message)}", file=sys.stderr)


def print_json(document: Any) -> None:
    """One JSON document on stdout, readable where stdout can show its characters, escaped where it cannot."""
    text = json.dumps(document, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        text = json.dumps(document)
    print(text)


def forgive_characters() -> None:
    """stdout shows "?" for a character that it cannot show, and the run goes on."""
    reconfigure: Any = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")


def console(stderr: bool = False) -> "Console":
    """Where tables go. Made anew each time: tests replace the streams."""
    from rich.console import Console

    made = Console(stderr=stderr, highlight=False, markup=False)
    if not made.is_terminal:
        made.width = 120  # rich assumes 80 columns where it cannot ask
    return made


_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_PICTURES |= dict.fromkeys(range(128, 160), 65533)


def harmless(text: str) -> str:
    """A model's text for a terminal: control characters as pictures, so that no output can drive the terminal."""
    return text.translate(_PICTURES)
