"""Programs of others that speak OpenAI's API, against a server of ours: lm-eval, LangChain and LiteLLM."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import skipstone
from tests.helpers.served import Process, serving, with_template

pytestmark = pytest.mark.clients

PYTHON = Path(__file__).parents[2] / ".venv-clients" / "bin" / "python"
QUIET = {"HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none", "LANGSMITH_TRACING": "false", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""Environment variables by which these programs ask nobody but the server."""
NAME = "nano-chat"
TEXTS = ["def add(a, b):\n    return", "import os\n\n\ndef main():\n", "class Stack:\n    def __init__(self):\n"]

TURNS = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "add two numbers"}]
COUNTED = {
    "type": "object",
    "properties": {"count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["count"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_template(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Any:
    return skipstone.load(None)[0], AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Process]:
    with serving(str(folder), "--served-model-name", NAME) as process:
        yield process


def expected(loaded: Any, prompt: Any, new: int) -> str:
    model, tokenizer = loaded
    text = skipstone.generate(model, prompt, tokenizer=tokenizer, max_new_tokens=new, do_sample=False).text
    assert isinstance(text, str)
    return text


def asked(script: str, *arguments: str, **requests: Any) -> dict[str, Any]:
    if not PYTHON.exists():
        pytest.skip("`make test-clients` sets up the programs that are tested here")
    command = [str(PYTHON), str(Path(__file__).parent / script), *arguments]
    environment = {**os.environ, **QUIET}
    done = subprocess.run(command, input=json.dumps(requests), capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_lm_eval_generates_until_a_string_and_its_log_likelihoods_are_those_of_the_model(
    served: Process, folder: Path, loaded: Any
) -> None:
    model, tokenizer = loaded

    def bare(text: str) -> list[int]:
        """The tokens that lm-eval sends, which begin without a token of the beginning."""
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    asking = [(text, {"until": ["\n\n"], "max_gen_toks": 24, "do_sample": False}) for text in TEXTS]
    next_token = int(model(torch.tensor([bare(TEXTS[0])])).logits[0, -1].argmax())
    pairs = [(TEXTS[0], tokenizer.decode([next_token])), (TEXTS[0], " window")]
    pairs += [(TEXTS[1], "    pass\n"), (TEXTS[2], "        self.items = []")]
    result = asked("ask_by_lm_eval.py", served.url, NAME, str(folder), generate_until=asking, loglikelihood=pairs)
    for text, generated in zip(TEXTS, result["generate_until"], strict=True):
        output = skipstone.generate(model, torch.tensor([bare(text)]), max_new_tokens=24, do_sample=False)
        assert output.new_tokens is not None
        assert generated == tokenizer.decode(output.new_tokens[0], skip_special_tokens=True).split("\n\n")[0]
    for (context, continuation), (own, greedy) in zip(pairs, result["loglikelihood"], strict=True):
        ids, before = bare(context + continuation), len(bare(context.rstrip()))  # as lm-eval divides them
        with torch.inference_mode():
            chances = model(torch.tensor([ids])).logits[0, before - 1 : -1].float().log_softmax(-1)
        rest = torch.tensor(ids[before:])
        assert own == pytest.approx(float(chances.gather(-1, rest[:, None]).sum()), abs=1e-2)
        assert greedy == bool((chances.argmax(-1) == rest).all())
    assert [greedy for _, greedy in result["loglikelihood"]][:2] == [True, False]


def test_langchain_completes_texts_and_chats_at_once_and_as_streams(served: Process, loaded: Any) -> None:
    schema = {"title": "thing", "description": "a thing", **COUNTED}
    result = asked("ask_by_langchain.py", served.url, NAME, texts=TEXTS, turns=TURNS, schema=schema, new=24)
    assert result["texts"] == [expected(loaded, text, 24) for text in TEXTS]
    assert "".join(result["streamed_text"]) == result["texts"][0]
    assert len(result["streamed_text"]) > 1
    assert result["chat"] == "".join(result["streamed_chat"]) == expected(loaded, TURNS, 24)
    assert 0 < result["output_tokens"] <= 24
    assert 0 <= result["structured"]["count"] <= 99


def test_litellm_completes_texts_and_chats_calls_tools_and_obeys_a_schema(served: Process, loaded: Any) -> None:
    tool = {"name": "count_to", "description": "counts", "parameters": COUNTED}
    result = asked("ask_by_litellm.py", served.url, NAME, text=TEXTS[0], turns=TURNS, tool=tool, schema=COUNTED, new=24)
    assert result["text"] == "".join(result["streamed_text"]) == expected(loaded, TEXTS[0], 24)
    assert result["chat"] == "".join(result["streamed_chat"]) == expected(loaded, TURNS, 24)
    assert min(len([piece for piece in result[kind] if piece]) for kind in ("streamed_text", "streamed_chat")) > 1
    prompt = len(loaded[1].apply_chat_template(TURNS, add_generation_prompt=True, return_dict=True)["input_ids"])
    for usage in (result["usage"], result["streamed_usage"]):
        assert usage["prompt_tokens"] == prompt
        assert usage["total_tokens"] == prompt + usage["completion_tokens"]
        assert 0 < usage["completion_tokens"] <= 24
    assert result["call"] == result["streamed_call"]
    assert result["call"]["name"] == "count_to"
    for written in (result["call"]["arguments"], result["structured"]):
        value = json.loads(written)
        assert set(value) == {"count"}
        assert 0 <= value["count"] <= 99
    figures = result["metrics"]["speculative_decoding"]
    assert 0 < figures["num_accepted_draft_tokens"] <= figures["num_draft_tokens"]
    name, status, said = result["refused"]
    assert (name, status) == ("BadRequestError", 400)
    assert "max_tokens" in said
