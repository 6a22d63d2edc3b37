"""What an error becomes: one line on stderr and an exit code."""

import os
import sys
from typing import Any

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
