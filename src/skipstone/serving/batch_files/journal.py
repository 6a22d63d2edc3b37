"""The output of a batch while it is made: a journal of answers as they come, and at the end one ordered file.

The journal lies beside the output. Its first line says what is answered and by what; every further line is an answer, on the
disk before the run goes on. A run that was killed goes on from it. The output appears all at once, and the journal goes then.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from skipstone.serving.batch_files.lines import Lines
from skipstone.utils.files import LineFile, json_line, plain, publish

KIND, VERSION = "skipstone-batch", 1
"""What the first line of a journal says."""
SUCCESS = 200
"""The status of a request that was answered."""

Answer = dict[str, Any]
"""A line of the output: id, custom_id, response, error, as OpenAI has them."""


def failed(answer: Answer) -> bool:
    """Whether a line of the output tells of an error."""
    response = answer["response"]
    return answer["error"] is not None or response is None or response["status_code"] != SUCCESS


def journal_of(output: Path) -> Path:
    """Where the journal of an output lies."""
    return output.with_name(f"{output.name}.journal")


def expect_free(output: Path, *, resume: bool) -> None:
    """Before any work: ValueError where something is there that a run would overwrite. resume: whether it may go on."""
    if not output.absolute().parent.is_dir():
        raise FileNotFoundError(2, "no such folder", str(output.parent))
    if output.exists() and not resume:
        raise ValueError(f"{output} exists already, and is never overwritten: give another file, or --resume to go on with it")
    if output.exists() and not output.is_file():
        raise ValueError(f"{output} is no file")
    if (journal := journal_of(output)).exists() and journal.stat().st_size and not resume:
        raise ValueError(f"{journal} is of a run that was interrupted: --resume goes on with it; remove it to begin anew")


def whole(output: Path, lines: Lines) -> int | None:
    """How many lines of an output tell of an error; None where there is no output. A journal that a killed run left beside a
    whole output goes. ValueError where the file that is there is not the output of these lines."""
    if not output.exists():
        return None
    count = failures = 0
    with output.open("rb") as file:
        for raw in file:
            answer = _loaded(raw)
            if count >= len(lines) or answer is None or answer.get("id") != lines[count].id:
                break
            count, failures = count + 1, failures + failed(answer)
        else:
            if count == len(lines):
                journal_of(output).unlink(missing_ok=True)
                return failures
    raise ValueError(f"{output} is not the output of {lines.path}, and is never overwritten: give another file")


def _loaded(raw: bytes) -> Any:
    """A JSON object; None for anything else."""
    try:
        found = json.loads(raw)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


class Journal:
    """The answers of a run so far, open to be written on. `with` closes it.

    output: the file that they become. lines: that are answered. about: by what, which is compared with the journal that is
    there; what is None on either side is not. ValueError where it is of another run, is damaged or is being written.
    """

    def __init__(self, output: Path, lines: Lines, about: Mapping[str, Any]) -> None:
        self.output, self.lines = output, lines
        self.failures = 0
        self._ours = False
        self._begins: dict[int, int] = {}  # number of a request -> bytes before its answer
        path = journal_of(output)
        self._file = LineFile(path)
        try:
            head = {"kind": KIND, "version": VERSION, "input": lines.digest, "about": plain(dict(about))}
            if self._read(head):
                self._file.go_on()
            else:
                self._file.begin(head, f"{path} is no journal of a batch, and is not overwritten: give another output")
            self._ours = True
        except BaseException:
            self.close()
            raise
        self._end = path.stat().st_size

    def _read(self, head: dict[str, Any]) -> bool:
        """What is there. False where not even the first line is whole."""
        first = True
        for number, (begin, raw) in enumerate(self._raw(), 1):
            line = _loaded(raw)
            if first:
                self._same(line, head)
                first = False
                continue
            if line is None or line.get("index") not in range(len(self.lines)) or not isinstance(line.get("answer"), dict):
                raise ValueError(f"{self._file.path}, line {number} is damaged")
            self._note(line["index"], begin, line["answer"])
        return not first

    def _raw(self) -> Iterator[tuple[int, bytes]]:
        """Whole lines, each with the bytes before it."""
        begin = 0
        with self._file.path.open("rb") as file:
            for raw in file:
                if raw.endswith(b"\n"):
                    yield begin, raw
                begin += len(raw)

    def _same(self, line: Any, head: dict[str, Any]) -> None:
        """ValueError where a journal's first line is that of another run."""
        path = self._file.path
        if line is None or line.get("kind") != KIND:
            raise ValueError(f"{path} is no journal of a batch, and is not overwritten: give another output")
        if line.get("version") != VERSION:
            raise ValueError(f"{path} is of version {line.get('version')}, this skipstone reads version {VERSION}")
        if line["input"] != head["input"]:
            raise ValueError(f"{path} is of another input than {self.lines.path}: give another output")
        there, here = line["about"], head["about"]
        for key in sorted(there.keys() & here.keys()):
            if None not in (there[key], here[key]) and there[key] != here[key]:
                said = f"{there[key]!r:.100} there, {here[key]!r:.100} here"
                raise ValueError(f"{path} is of another run: {key} is {said}; give another output, or the same settings")

    def _note(self, index: int, begin: int, answer: Answer) -> None:
        if index not in self._begins:
            self._begins[index] = begin
            self.failures += failed(answer)

    @property
    def done(self) -> int:
        """Requests that have an answer."""
        return len(self._begins)

    @property
    def missing(self) -> list[int]:
        """Numbers of the requests that have no answer yet."""
        return [index for index in range(len(self.lines)) if index not in self._begins]

    def add(self, *answers: tuple[int, Answer]) -> int:
        """Write answers, each with the number of its request; when this returns they are on the disk. A request that has one
        already keeps it. Returns how many were new."""
        new = dict(one for one in answers if one[0] not in self._begins)
        written = [{"index": index, "answer": answer} for index, answer in new.items()]
        self._file.add(*written)
        for line in written:
            self._note(line["index"], self._end, line["answer"])
            self._end += len(json_line(line).encode())
        return len(new)

    def finish(self) -> None:
        """Write the output, in the order of the input, all at once, and remove the journal. ValueError where something has
        come to its place meanwhile."""
        hidden = self.output.with_name(f".{self.output.name}")
        try:
            with self._file.path.open("rb") as journal, hidden.open("wb") as file:
                for index in range(len(self.lines)):
                    journal.seek(self._begins[index])
                    file.write(json_line(json.loads(journal.readline())["answer"]).encode())
            if self.output.exists():
                raise ValueError(f"{self.output} has come meanwhile, and stays: the answers are in {self._file.path}")
            publish(hidden, self.output)
        finally:
            hidden.unlink(missing_ok=True)
        self._file.path.unlink()

    def close(self) -> None:
        """Let others write. A journal without an answer goes."""
        if self._ours and not self._begins:
            self._file.path.unlink(missing_ok=True)
        self._file.close()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
