"""The lines of the log: one an event, whatever is in it."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import pytest

from skipstone.cli.serve import LOG_FORMATS
from skipstone.serving import logs


def event(message: str, *args: Any, fields: dict[str, Any] | None = None, failed: bool = False) -> logging.LogRecord:
    found = sys.exc_info() if failed else None
    record = logging.LogRecord("skipstone.serving.model_thread", logging.ERROR, __file__, 1, message, args, found)
    if fields is not None:
        record.fields = fields
    return record


def failed(message: str) -> logging.LogRecord:
    try:
        raise RuntimeError("planted\nin two lines")
    except RuntimeError:
        return event(message, failed=True)


def test_the_command_knows_the_forms() -> None:
    assert list(LOG_FORMATS) == list(logs.FORMS)


def test_an_error_is_one_line_of_json_with_its_traceback_in_a_field() -> None:
    line = logs.JsonFormatter().format(failed("a step failed"))
    assert "\n" not in line
    told = json.loads(line)
    assert (told["level"], told["logger"], told["message"]) == ("error", "skipstone.serving.model_thread", "a step failed")
    assert told["error"] == "RuntimeError"
    assert told["traceback"].startswith("Traceback")
    assert told["traceback"].endswith("planted\nin two lines")
    assert told["time"].endswith("+00:00")


def test_fields_are_json_values_in_json_and_quoted_where_they_must_be_in_text() -> None:
    record = event(
        "request %s",
        7,
        fields={"status": 200, "route": "/v1/models", "reasons": ["stop", "length"], "id": "a\nb c", "whole": True},
    )
    told = json.loads(logs.JsonFormatter().format(record))
    assert (told["message"], told["status"], told["reasons"], told["id"]) == ("request 7", 200, ["stop", "length"], "a\nb c")
    line = logs.TextFormatter().format(record)
    assert line.endswith(': request 7 status=200 route=/v1/models reasons=stop,length id="a\\nb c" whole=true')
    assert "\n" not in line


def test_a_traceback_follows_its_line_of_text() -> None:
    lines = logs.TextFormatter().format(failed("a step failed")).splitlines()
    assert lines[0].endswith("ERROR skipstone.serving.model_thread: a step failed")
    assert lines[1].startswith("Traceback")


@pytest.mark.parametrize("form", logs.FORMS)
def test_everybody_s_events_go_to_one_handler(form: str) -> None:
    told = logs.config(form)
    assert told["formatters"]["line"]["()"] is logs.FORMS[form]
    assert told["root"]["handlers"] == list(told["handlers"]) == ["stderr"]
    assert told["handlers"]["stderr"]["stream"] == "ext://sys.stderr"
    assert told["loggers"] == {"skipstone": {"handlers": [], "level": "INFO", "propagate": True}}
    assert not told["disable_existing_loggers"]
