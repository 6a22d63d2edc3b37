"""The tokens that a model uses most often, for `draft_vocabulary`: a JSON list of ids.

    python recipes/smollm2/shortlist.py runs/smollm2/said.json runs/smollm2/heads-maths/answers.jsonl
    python recipes/smollm2/shortlist.py runs/smollm2/commands.json --commands runs/smollm2/model
    python recipes/smollm2/shortlist.py runs/gemma/list.json gsm8k_train.jsonl mbpp.jsonl --texts MODEL --count 32768

The first form counts tokens in answers of `skipstone train heads`, the second in answers of the commands task's training part.
The third counts tokens in all texts of JSON lines and fills its list up with the vocabulary's first ids. Those alone are a bad
list if single characters, digits among them, come last in the vocabulary, as in Gemma's.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from transformers import AutoTokenizer

from skipstone.engines.loading import load_tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
import commands  # type: ignore[import-not-found]

COUNT = 8192  # maximum number of tokens of a list
EXAMPLES = 20_000  # counted examples of the commands task


def answers_of_runs(files: Sequence[Path]) -> Iterator[list[int]]:
    """The answers in files of `skipstone train heads`, as ids."""
    for file in files:
        _, *lines = file.read_text(encoding="utf-8").splitlines()
        yield from (json.loads(line)["tokens"] for line in lines)


def answers_of_commands(model: Path) -> Iterator[list[int]]:
    """The answers of the commands task as ids of a model's tokenizer, each with its end-of-sequence token."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    for one in commands.examples("train", EXAMPLES, 0):
        yield [*tokenizer(one.answer)["input_ids"], tokenizer.eos_token_id]


def texts_of_lines(model: str, files: Sequence[Path]) -> Iterator[list[int]]:
    """Every text in files of JSON lines, also those in lists, as ids of a model's tokenizer."""
    tokenizer = load_tokenizer(model)
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            values = chain.from_iterable(one if isinstance(one, list) else [one] for one in json.loads(line).values())
            yield from (tokenizer(text, add_special_tokens=False)["input_ids"] for text in values if isinstance(text, str))


def fill_up(ids: list[int], count: int) -> list[int]:
    """Ids with the first others of a vocabulary, `count` in all, ascending."""
    others = sorted(set(range(count)) - set(ids))
    return sorted([*ids, *others[: count - len(ids)]])


def commonest(answers: Iterable[list[int]], count: int) -> list[int]:
    """The most frequent ids in answers, ascending. Prints their share of all tokens to stderr."""
    counts = Counter(token for tokens in answers for token in tokens)
    shortlist = counts.most_common(count)
    print(
        f"{len(shortlist)} of {len(counts)} tokens, {sum(n for _, n in shortlist) / counts.total():.4f} of all occurrences",
        file=sys.stderr,
    )
    return sorted(token for token, _ in shortlist)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("answers", type=Path, nargs="*")
    parser.add_argument("--commands", type=Path, help="a model folder: count the commands task instead")
    parser.add_argument("--texts", metavar="MODEL", help="the files are JSON lines with texts, for this model's tokenizer")
    parser.add_argument("--count", type=int, default=COUNT)
    args = parser.parse_args()
    if not args.commands and not args.answers:
        parser.error("give files of answers, or --commands")
    if args.texts:
        answers = texts_of_lines(args.texts, args.answers)
    else:
        answers = answers_of_commands(args.commands) if args.commands else answers_of_runs(args.answers)
    shortlist = commonest(answers, args.count)
    shortlist = fill_up(shortlist, args.count) if args.texts else shortlist
    args.out.write_text(json.dumps(shortlist), encoding="utf-8")
