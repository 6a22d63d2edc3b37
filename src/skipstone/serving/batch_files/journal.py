"""The journal of a batch: every answer is on the disk before the run goes on, and at the end it becomes one ordered file.

The journal is an SQLite database next to the output, with the settings of the run and the answers. A run that was killed
continues it. The output appears all at once, and then the journal is removed.
"""

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from skipstone.serving.batch_files.request_lines import RequestFile
from skipstone.utils.files import json_line, plain, publish

VERSION = 2
"""Of the journal's tables."""
APPLICATION = 0x736B6970
"""The id in the head of an SQLite database that is a journal."""
SUCCESS = 200
"""The status of a request that was answered."""

OutputLine = dict[str, Any]
"""A line of the output: id, custom_id, response, error, as in OpenAI's batch API."""


def is_error(answer: OutputLine) -> bool:
    """Whether a line of the output reports an error."""
    response = answer.get("response")
    return answer.get("error") is not None or response is None or response["status_code"] != SUCCESS


def journal_of(output: Path) -> Path:
    """The path of an output's journal."""
    return output.with_name(f"{output.name}.journal")


def _remove(journal: Path) -> None:
    """Remove it, and the file in which SQLite keeps an unfinished change."""
    for path in (journal, journal.with_name(f"{journal.name}-journal")):
        path.unlink(missing_ok=True)


def expect_free(output: Path, *, resume: bool) -> None:
    """ValueError if a run would overwrite something. resume: whether it may continue an earlier run."""
    if not output.absolute().parent.is_dir():
        raise FileNotFoundError(2, "no such folder", str(output.parent))
    if output.exists() and not resume:
        raise ValueError(f"{output} exists already, and is never overwritten: give another file, or --resume to go on with it")
    if output.exists() and not output.is_file():
        raise ValueError(f"{output} is no file")
    if (journal := journal_of(output)).exists() and journal.stat().st_size and not resume:
        raise ValueError(f"{journal} is of a run that was interrupted: --resume goes on with it; remove it to begin anew")


def count_errors(output: Path, requests: RequestFile) -> int | None:
    """Number of errors in a complete output; None if there is no output. A journal that a killed run left is removed.
    ValueError if the file is not the output of these requests."""
    if not output.exists():
        return None
    try:
        with output.open("rb") as file:
            found = [(answer["id"], is_error(answer)) for answer in map(json.loads, file)]
    except (ValueError, TypeError, LookupError):
        found = []
    if [id_ for id_, _ in found] != [requests[index].id for index in range(len(requests))]:
        raise ValueError(f"{output} is not the output of {requests.path}, and is never overwritten: give another file")
    _remove(journal_of(output))
    return sum(failed for _, failed in found)


class Journal:
    """The answers of a run so far, open for writing. `with` closes it.

    output: the file that they become. requests: the input. settings: of the run. Those that the journal has as well must be the
    same. ValueError if the journal belongs to another run, is damaged or is being written."""

    def __init__(self, output: Path, requests: RequestFile, settings: Mapping[str, Any]) -> None:
        self.output, self.requests, self.path = output, requests, journal_of(output)
        with self._explained_errors():
            self._database = sqlite3.connect(self.path, timeout=0, check_same_thread=False)
            try:
                self._begin(plain({"version": VERSION, "input": requests.digest, **settings}))
            except BaseException:
                self._database.close()
                raise

    @contextmanager
    def _explained_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_BUSY:
                raise ValueError(f"{self.path} is being written by another run, or its file system has no locks") from error
            reason = f"is no journal of a batch, is damaged or cannot be written, and stays as it is: {error}"
            raise OSError(f"{self.path} {reason}") from error

    def _begin(self, settings: dict[str, Any]) -> None:
        """Take the journal for this run, and read what it has."""
        execute = self._database.execute
        execute("PRAGMA locking_mode = EXCLUSIVE")
        execute("BEGIN EXCLUSIVE")
        (num_tables,) = execute("SELECT count(*) FROM sqlite_schema").fetchone()
        if num_tables and execute("PRAGMA application_id").fetchone() != (APPLICATION,):
            raise ValueError(f"{self.path} is the database of another program, and is never overwritten")
        execute(f"PRAGMA application_id = {APPLICATION}")
        execute("CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value TEXT)")
        execute("CREATE TABLE IF NOT EXISTS answers (number INTEGER PRIMARY KEY, line BLOB, is_error INTEGER)")
        there = {name: json.loads(value) for name, value in execute("SELECT name, value FROM settings")}
        for name in sorted(there.keys() & settings.keys()):
            if there[name] != settings[name]:
                difference = f"{there[name]!r:.100} there, {settings[name]!r:.100} here"
                raise ValueError(
                    f"{self.path} is of another run: {name} is {difference}; give another output, or the same {name}"
                )
        if not there:
            rows = [(name, json.dumps(value)) for name, value in settings.items()]
            self._database.executemany("INSERT INTO settings VALUES (?, ?)", rows)
        answers: dict[int, bool] = dict(execute("SELECT number, is_error FROM answers"))
        self._done, self.num_errors = set(answers), sum(answers.values())
        self._database.commit()

    @property
    def num_done(self) -> int:
        """Number of requests with an answer."""
        return len(self._done)

    @property
    def missing(self) -> list[int]:
        """Numbers of the requests without an answer."""
        return [index for index in range(len(self.requests)) if index not in self._done]

    def add(self, *answers: tuple[int, OutputLine]) -> int:
        """Write answers, each with the number of its request, to the disk. The first answer to a request is kept. Returns the
        number of new ones."""
        new = {index: answer for index, answer in answers if index not in self._done}
        rows = [(index, json_line(answer).encode(), is_error(answer)) for index, answer in new.items()]
        with self._explained_errors(), self._database:
            self._database.executemany("INSERT INTO answers VALUES (?, ?, ?)", rows)
        self._done |= new.keys()
        self.num_errors += sum(failed for _, _, failed in rows)
        return len(new)

    def finish(self) -> None:
        """Write the output in the order of the input, all at once, and remove the journal. ValueError if a file has appeared in
        its place."""
        hidden = self.output.with_name(f".{self.output.name}")
        try:
            with self._explained_errors(), hidden.open("wb") as file:
                for (line,) in self._database.execute("SELECT line FROM answers ORDER BY number"):
                    file.write(self._expect_answer(line))
            if self.output.exists():
                raise ValueError(f"{self.output} has come meanwhile, and stays: the answers are in {self.path}")
            publish(hidden, self.output)
        finally:
            hidden.unlink(missing_ok=True)
        _remove(self.path)
        self._database.close()

    def _expect_answer(self, line: bytes) -> bytes:
        """The line. ValueError if it is no answer: SQLite does not notice damaged bytes."""
        try:
            json.loads(line)
        except ValueError as error:
            raise ValueError(f"{self.path} is damaged, and stays: an answer is no JSON") from error
        return line

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        """Let others write. A journal without an answer is removed."""
        if not self._done:
            _remove(self.path)
        self._database.close()
