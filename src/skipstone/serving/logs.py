"""The server's log on stderr: one line of text or JSON per event. A request gets its line when it ends."""

import json
import logging
import re
from datetime import UTC, datetime
from typing import Any

from skipstone.serving.request_record import RequestRecord

UNLOGGED_ROUTES = ("/health", "/metrics")
"""Routes that are not logged, because machines ask them every few seconds."""
PLAIN = re.compile(r"[\w.,:/+-]+", re.ASCII)
"""Values without quotes in a line of text."""
OURS = "skipstone"
"""The logger that writes from INFO on; all others write warnings and errors. uvicorn would say that the server runs before
it has a model."""
THEIRS = ("transformers", "huggingface_hub")
"""Loggers with a handler of their own, which writes no JSON."""

logger = logging.getLogger("skipstone.serving.requests")


class TextFormatter(logging.Formatter):
    """Text: time, level, logger, message, name=value of every field; then the traceback."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line, without the traceback."""
        fields = {name: _joined(value) for name, value in _fields(record).items()}
        return " ".join([super().formatMessage(record), *(f"{name}={value}" for name, value in fields.items())])


class JsonFormatter(logging.Formatter):
    """A JSON object on one line: time (UTC), level, logger, message, all fields, traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        told = {"time": time, "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        told |= _fields(record)
        if record.exc_info and record.exc_info[0] is not None:
            told |= {"error": record.exc_info[0].__name__, "traceback": self.formatException(record.exc_info)}
        return json.dumps(told, default=str)


FORMS: dict[str, type[logging.Formatter]] = {"text": TextFormatter, "json": JsonFormatter}
"""What --log-format may be."""


def set_up(form: str) -> None:
    """Set up the log of this process: everything goes to stderr, in one of FORMS. JSON includes warnings of Python and other
    packages."""
    handler = logging.StreamHandler()
    handler.setFormatter(FORMS[form]())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger(OURS).setLevel(logging.INFO)
    if form == "json":
        logging.captureWarnings(True)
        for name in THEIRS:
            other = logging.getLogger(name)
            other.handlers.clear()
            other.propagate = True


def request(record: RequestRecord) -> None:
    """The line of a request that has ended."""
    if record.route not in UNLOGGED_ROUTES:
        level = logging.WARNING if record.status >= 500 or record.failure else logging.INFO
        if logger.isEnabledFor(level):
            logger.log(level, "request", extra={"fields": record.fields()})


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return getattr(record, "fields", {})


def _joined(value: Any) -> str:
    """A value in a line of text; quoted if it has blanks or could end the line."""
    values = value if isinstance(value, list) else [value]
    text = ",".join(one if isinstance(one, str) else json.dumps(one, default=str) for one in values)
    return text if PLAIN.fullmatch(text) else json.dumps(text)
