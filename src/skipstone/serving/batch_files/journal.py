"""The journal of a batch: every answer is on the disk before the run goes on, and at the end it becomes one ordered file.

The journal lies next to the output. Its first line holds the settings of the run, and every further line an answer. A run that
was killed continues it. The output appears all at once, and then the journal is removed.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skipstone.serving.batch_files.request_lines import RequestFile
from skipstone.utils.files import LineFile, json_line, plain, publish

KIND, VERSION = "skipstone-batch", 1
"""In the first line of a journal."""
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
    ids, num_errors = list[Any](), 0
    with output.open("rb") as file:
        for raw in file:
            answer = _parse_object(raw)
            ids.append(answer.get("id"))
            num_errors += is_error(answer)
    if ids != [requests[index].id for index in range(len(requests))]:
        raise ValueError(f"{output} is not the output of {requests.path}, and is never overwritten: give another file")
    journal_of(output).unlink(missing_ok=True)
    return num_errors


def _parse_object(raw: bytes) -> dict[str, Any]:
    """A JSON object; an empty one for anything else."""
    try:
        value = json.loads(raw)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


class Journal:
    """The answers of a run so far, open for writing. `with` closes it.

    output: the file that they become. requests: the input. settings: of the run. They are compared with those of the journal,
    if neither is None. ValueError if the journal belongs to another run, is damaged or is being written."""

    def __init__(self, output: Path, requests: RequestFile, settings: Mapping[str, Any]) -> None:
        self.output, self.requests = output, requests
        self.num_errors = 0
        self._is_ours = False
        self._offsets: dict[int, int] = {}  # number of a request -> bytes before its answer
        path = journal_of(output)
        self._file = LineFile(path)
        try:
            head = {"kind": KIND, "version": VERSION, "input": requests.digest, "about": plain(dict(settings))}
            if self._read(head):
                self._file.go_on()
            else:
                self._file.begin(head, self._not_a_journal)
            self._is_ours = True
        except BaseException:
            self.close()
            raise
        self._end = path.stat().st_size

    @property
    def _not_a_journal(self) -> str:
        return f"{self._file.path} is no journal of a batch, and is not overwritten: give another output"

    def _read(self, head: dict[str, Any]) -> bool:
        """Read the answers. False if not even the first line is complete."""
        offset = number = 0
        with self._file.path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.endswith(b"\n"):
                    return number > 1
                line = _parse_object(raw)
                if number == 1:
                    self._check_head(line, head)
                elif line.get("index") not in range(len(self.requests)) or not isinstance(line.get("answer"), dict):
                    raise ValueError(f"{self._file.path}, line {number} is damaged")
                else:
                    self._note(line["index"], offset, line["answer"])
                offset += len(raw)
        return number > 0

    def _check_head(self, line: Any, head: dict[str, Any]) -> None:
        """ValueError if a journal's first line is that of another run."""
        path = self._file.path
        if line.get("kind") != KIND:
            raise ValueError(self._not_a_journal)
        if line.get("version") != VERSION:
            raise ValueError(f"{path} is of version {line.get('version')}, this skipstone reads version {VERSION}")
        if line["input"] != head["input"]:
            raise ValueError(f"{path} is of another input than {self.requests.path}: give another output")
        there, here = line["about"], head["about"]
        for key in sorted(there.keys() & here.keys()):
            if None not in (there[key], here[key]) and there[key] != here[key]:
                difference = f"{there[key]!r:.100} there, {here[key]!r:.100} here"
                raise ValueError(f"{path} is of another run: {key} is {difference}; give another output, or the same settings")

    def _note(self, index: int, offset: int, answer: OutputLine) -> None:
        if index not in self._offsets:
            self._offsets[index] = offset
            self.num_errors += is_error(answer)

    @property
    def num_done(self) -> int:
        """Number of requests with an answer."""
        return len(self._offsets)

    @property
    def missing(self) -> list[int]:
        """Numbers of the requests without an answer."""
        return [index for index in range(len(self.requests)) if index not in self._offsets]

    def add(self, *answers: tuple[int, OutputLine]) -> int:
        """Write answers, each with the number of its request, to the disk. The first answer to a request is kept. Returns the
        number of new ones."""
        new = dict(one for one in answers if one[0] not in self._offsets)
        lines = [{"index": index, "answer": answer} for index, answer in new.items()]
        self._file.add(*lines)
        for line in lines:
            self._note(line["index"], self._end, line["answer"])
            self._end += len(json_line(line).encode())
        return len(new)

    def finish(self) -> None:
        """Write the output in the order of the input, all at once, and remove the journal. ValueError if a file has appeared in
        its place."""
        hidden = self.output.with_name(f".{self.output.name}")
        try:
            with self._file.path.open("rb") as journal, hidden.open("wb") as file:
                for index in range(len(self.requests)):
                    journal.seek(self._offsets[index])
                    file.write(json_line(json.loads(journal.readline())["answer"]).encode())
            if self.output.exists():
                raise ValueError(f"{self.output} has come meanwhile, and stays: the answers are in {self._file.path}")
            publish(hidden, self.output)
        finally:
            hidden.unlink(missing_ok=True)
        self._file.path.unlink()

    def close(self) -> None:
        """Let others write. A journal without an answer is removed."""
        if self._is_ours and not self._offsets:
            self._file.path.unlink(missing_ok=True)
        self._file.close()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
