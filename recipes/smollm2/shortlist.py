"""The tokens that a model says most often, for `draft_vocabulary`: a JSON list of ids.

    python recipes/smollm2/shortlist.py runs/smollm2/said.json runs/smollm2/heads-maths/answers.jsonl
    python recipes/smollm2/shortlist.py runs/smollm2/commands.json --commands runs/smollm2/model

The first form counts the answers that runs of `skipstone train heads` have written. The second counts the answers of the
commands task's training part, as the tokenizer of a model folder reads them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
import commands  # type: ignore[import-not-found]

COUNT = 8192  # tokens of a list, at most
EXAMPLES = 20_000  # of the commands task that are counted


def of_runs(files: Sequence[Path]) -> Iterator[list[int]]:
    """The answers in files of `skipstone train heads`, as ids."""
    for file in files:
        _, *lines = file.read_text(encoding="utf-8").splitlines()
        yield from (json.loads(line)["tokens"] for line in lines)


def of_commands(model: Path) -> Iterator[list[int]]:
    """The answers of the commands task, as ids of a model's tokenizer, its end of the text behind each."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    for one in commands.examples("train", EXAMPLES, 0):
        yield [*tokenizer(one.answer)["input_ids"], tokenizer.eos_token_id]


def commonest(answers: Iterable[list[int]], count: int) -> list[int]:
    """The ids that answers hold most often, ascending, and the share of all tokens that they are on stderr."""
    found = Counter(token for tokens in answers for token in tokens)
    kept = found.most_common(count)
    print(
        f"{len(kept)} of {len(found)} tokens, {sum(n for _, n in kept) / found.total():.4f} of all that is said",
        file=sys.stderr,
    )
    return sorted(token for token, _ in kept)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("answers", type=Path, nargs="*")
    parser.add_argument("--commands", type=Path, help="a model folder: count the commands task instead")
    parser.add_argument("--count", type=int, default=COUNT)
    asked = parser.parse_args()
    if not asked.commands and not asked.answers:
        parser.error("give files of answers, or --commands")
    said = of_commands(asked.commands) if asked.commands else of_runs(asked.answers)
    asked.out.write_text(json.dumps(commonest(said, asked.count)), encoding="utf-8")
