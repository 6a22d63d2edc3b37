"""A checkpoint on disk for the command line."""

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.helpers.machine import llama

EOS = 96
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama whose early exits agree now and then, and a tokenizer of one id per printable character."""
    path = tmp_path_factory.mktemp("checkpoints") / "ok"
    model = llama(vocab=97, layers=4)
    model.config.max_position_embeddings = 1 << 17  # a run nobody waits for, to be interrupted
    model.config.eos_token_id = model.generation_config.eos_token_id = EOS
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    core = Tokenizer(models.BPE({_byte(character): i for i, character in enumerate(characters)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    model.save_pretrained(path)
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", chat_template=TEMPLATE).save_pretrained(path)
    return path


def _byte(character: str) -> str:
    return {" ": "Ġ", "\n": "Ċ"}.get(character, character)


@pytest.fixture
def variant(folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the checkpoint with one JSON file changed, or another thing done to it."""

    def make(file: str | None = None, **changes: Any) -> Path:
        copy = tmp_path / "variant"
        shutil.copytree(folder, copy)
        if file is not None:
            content = json.loads((copy / file).read_text())
            (copy / file).write_text(json.dumps(content | changes))
        return copy

    return make


@pytest.fixture
def hears_ctrl_c() -> Iterator[None]:
    """A shell that runs the tests in the background has them ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
