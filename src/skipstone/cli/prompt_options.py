"""Texts that a verb measures with, and their token ids."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skipstone.cli.files import expect_readable
from skipstone.cli.options import OptionGroup, option


def expect_prompt_files(*files: Path) -> None:
    """OSError or ValueError for anything but files of JSON lines."""
    expect_readable(*files)
    for file in files:
        if file.suffix != ".jsonl":
            raise ValueError(f"--prompts takes JSON lines, a file that ends in .jsonl, found {file}")


@dataclass(frozen=True)
class PromptOptions(OptionGroup):
    """Texts to measure with: given one by one, in files, or bundled."""

    prompt: list[str] | None = option(None, "A text to decode; several times. Default: bundled prompts.")
    prompts: list[Path] | None = option(None, 'JSON lines with a "prompt", instead of --prompt; several times.')

    def texts(self) -> list[str]:
        """All texts; every fifth bundled one by default. ValueError if both options are given, and for an empty text."""
        from skipstone.lab.tasks.data_sets import named

        if self.prompt and self.prompts:
            raise ValueError("give either --prompt or --prompts, found both")
        expect_prompt_files(*(self.prompts or ()))
        texts = self.prompt
        if not texts:
            tasks = [(named(str(file)), 1) for file in self.prompts or ()] or [(named("self"), 5)]
            texts = [task.ask(row)[0] for task, stride in tasks for row in task.records(None)[::stride]]
        if "" in texts:
            raise ValueError("a prompt is empty: there is no token to start from")
        return texts


def encode_texts(texts: list[str], tokenizer: Any) -> list[Any]:
    """The token ids of texts, [T] int64 each."""
    import torch

    from skipstone.hf.api import token_ids

    return [torch.tensor(token_ids(text, tokenizer), dtype=torch.int64, device="cpu") for text in texts]
