"""The same settings give the same request, whoever asks: Python, HTTP, a line of a batch file or the command line."""

import asyncio
from typing import Any

import pytest
from transformers import GenerationConfig

import skipstone
from skipstone.cli.chat import Chat, ChatSamplingOptions
from skipstone.cli.chat import chat as cli_chat
from skipstone.cli.generate import GenerationOptions, OutputOptions, PlacedModelOptions, PromptSource
from skipstone.cli.generate import generate as cli_generate
from skipstone.cli.option_groups import GenerationModelOptions, MethodOptions
from skipstone.decoding.loop import DecodingLoop
from skipstone.decoding.request import Request
from skipstone.engines import mapped_loading
from skipstone.models.generation_config import GenerationFields
from skipstone.serving.api_schemas import ChatBody, CompletionBody
from skipstone.serving.batch_files.answer_line import answer_line
from skipstone.serving.batch_files.request_lines import RequestLine
from skipstone.serving.server import Server, read_all
from skipstone.serving.settings import ServerSettings
from tests.helpers import families
from tests.helpers.described import described
from tests.helpers.options import LAW, TEXT
from tests.helpers.pairwise import round_robin, slow_except
from tests.helpers.support import tokenizer

PROMPT = "abcxstop theabcab"
TOKENS = 5
SAMPLED = {"temperature": 0.7, "top_k": 4, "top_p": 0.6, "min_p": 0.1}
ALL_TOKENS = {"temperature": 1.3, "top_k": 0, "top_p": 1.0}
ASKED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "greedy": ({"do_sample": False}, {"temperature": 0}, {}),
    "sampled": ({"do_sample": True, **SAMPLED}, SAMPLED, SAMPLED),
    "all tokens": ({"do_sample": True, **ALL_TOKENS}, ALL_TOKENS, ALL_TOKENS),
    "stop": ({"do_sample": False, "stop_strings": ["ab", "q"]}, {"temperature": 0, "stop": ["ab", "q"]}, {"stop": ["ab", "q"]}),
    "ignore eos": ({"do_sample": False, "eos_token_id": None}, {"temperature": 0, "ignore_eos": True}, {"ignore_eos": True}),
}
"""What is asked, as options of `skipstone.generate`, as a body, as flags of `skipstone generate`."""
OWN: dict[str, dict[str, Any]] = {
    "nothing": {},
    "stop string": {"stop_strings": "<23>"},
    "several ends": {"eos_token_id": [60, 72], "pad_token_id": 60},
    "ends that may not come yet": {"eos_token_id": [60, 72], "min_new_tokens": 3},
    "several rows": {"num_return_sequences": 2, "do_sample": True},
    "fewer tokens": {"max_new_tokens": 2},
    "the padding is in the prompt": {"pad_token_id": 3},
    **{name: {**case.base, **case.options} for name, case in TEXT.items() if name != "max_time"},
    **{name: {"do_sample": True, **options} for name, options in LAW.items()},
}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    result: list[Request] = []
    admit = DecodingLoop.admit

    def recording(decoder: DecodingLoop, row: int, request: Request, *cached: Any) -> int:
        result.append(request)
        return admit(decoder, row, request, *cached)

    monkeypatch.setattr(DecodingLoop, "admit", recording)
    return result


def over_http_and_in_a_batch(model: Any, words: Any, body: dict[str, Any], url: str = "/v1/completions") -> None:
    async def scenario() -> None:
        server = Server(lambda: (model, words), ServerSettings(max_num_seqs=1, drain_seconds=0, method="autoregressive"))
        await server.start()
        request = ChatBody.model_validate(body) if "chat" in url else CompletionBody.model_validate(body)
        _, updates = await server.answer(request)
        await read_all(updates)
        answer = await answer_line(server, RequestLine(custom_id="a", method="POST", url=url, body=body))
        assert answer["response"]["status_code"] == 200, answer
        await server.stop()

    asyncio.run(scenario())


def all_ways(monkeypatch: pytest.MonkeyPatch, own: dict[str, Any], asked: str) -> None:
    model, words = families.build("llama"), tokenizer()
    model.generation_config = GenerationConfig(**{"eos_token_id": 1, "pad_token_id": 0, **own})
    options, body, flags = ASKED[asked]
    skipstone.generate(
        model, PROMPT, "autoregressive", tokenizer=words, seed=7, max_new_tokens=TOKENS, num_return_sequences=1, **options
    )
    over_http_and_in_a_batch(model, words, {"prompt": PROMPT, "max_tokens": TOKENS, "seed": 7, **body})
    mapped = families.mapped(model)  # which merges common options without transformers
    mapped.generation_config = GenerationFields({"eos_token_id": 1, "pad_token_id": 0, **own})
    over_http_and_in_a_batch(mapped, words, {"prompt": PROMPT, "max_tokens": TOKENS, "seed": 7, **body})
    monkeypatch.setattr(mapped_loading, "load_for_decoding", lambda *_, **__: (mapped, words))
    seed: dict[str, Any] = {"seed": 7} if "temperature" in flags else {}
    decoding = GenerationOptions(max_new_tokens=TOKENS, **flags, **seed)
    cli_generate(PromptSource(PROMPT), MethodOptions("autoregressive"), decoding, PlacedModelOptions(), OutputOptions())


@round_robin(asked=ASKED, own=["nothing", "several ends", "ends that may not come yet", "stop string"])
def test_all_ways_build_the_same_request(own: str, asked: str, seen: list[Request], monkeypatch: pytest.MonkeyPatch) -> None:
    all_ways(monkeypatch, OWN[own], asked)
    same(seen, is_greedy="temperature" not in ASKED[asked][0])


@pytest.mark.parametrize("own", slow_except([*OWN][3::2], [name for name in OWN if name not in ("nothing", "several ends")]))
def test_a_model_s_own_settings_count_in_all_ways(own: str, seen: list[Request], monkeypatch: pytest.MonkeyPatch) -> None:
    all_ways(monkeypatch, OWN[own], "greedy")
    same(seen, is_greedy=True)


def same(seen: list[Request], count: int = 6, *, is_greedy: bool = False) -> Any:
    result = [described(one) for one in seen]
    if is_greedy:  # the command line draws a seed, and nothing is drawn with it
        for one in result:
            one["sampling"]["seed"] = 0
    assert result == [result[0]] * count
    return result[0]


@pytest.mark.parametrize("own", ["nothing", "sampled", "stop_strings"])
def test_a_request_that_says_nothing_takes_the_model_s_own_settings(own: str, seen: list[Request]) -> None:
    """The command line has defaults of its own, which --help names."""
    settings = {"do_sample": True, "temperature": 0.6, "top_k": 7, "top_p": 0.8} if own == "sampled" else OWN[own]
    model, words = families.build("llama"), tokenizer()
    model.generation_config = GenerationConfig(**{"eos_token_id": 1, "pad_token_id": 0, "max_new_tokens": 4, **settings})
    turns = [{"role": "user", "content": PROMPT}]
    skipstone.generate(model, turns, "autoregressive", tokenizer=words, seed=7)
    over_http_and_in_a_batch(model, words, {"messages": turns, "seed": 7}, "/v1/chat/completions")
    assert same(seen, 3)["max_new_tokens"] == 4


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_chat_builds_the_request_of_the_server(
    temperature: float, seen: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, words = families.build("llama"), tokenizer()
    model.generation_config = GenerationConfig(eos_token_id=[1, 60], pad_token_id=0, stop_strings=["<23>"], top_k=9)
    monkeypatch.setattr(mapped_loading, "load_for_decoding", lambda *_, **__: (model, words))
    monkeypatch.setattr(Chat, "talk", lambda chat, _: chat._answer(PROMPT))
    sampled: dict[str, Any] = {"temperature": temperature, "top_p": 0.7, "seed": 7} if temperature else {}
    sampling = ChatSamplingOptions(max_new_tokens=TOKENS, **sampled)
    chosen = MethodOptions("autoregressive")
    cli_chat(method=chosen, system=None, sampling=sampling, model=GenerationModelOptions(), color=None)
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": TOKENS, "temperature": 0, **sampled, "seed": 7}
    over_http_and_in_a_batch(model, words, body, "/v1/chat/completions")
    same(seen, 3, is_greedy=not temperature)


def test_a_prompt_that_begins_a_stop_string_does_not_end_the_answer_of_a_server(seen: list[Request]) -> None:
    """OpenAI's `stop` looks at what is written; transformers' stop_strings at the prompt as well."""
    model, words = families.build("llama"), tokenizer()
    first: Any = skipstone.generate(model, PROMPT, "autoregressive", tokenizer=words, max_new_tokens=3, do_sample=False)
    text = str(words.decode(first.new_tokens[0][:1]))
    stop = PROMPT[-1] + text[:1]
    python: Any = skipstone.generate(
        model, PROMPT, "autoregressive", tokenizer=words, max_new_tokens=3, do_sample=False, stop_strings=[stop]
    )
    assert len(python.new_tokens[0]) == 1
    over_http_and_in_a_batch(model, words, {"prompt": PROMPT, "max_tokens": 3, "temperature": 0, "stop": [stop]})
    assert seen[-1].stop_strings is not None
    assert not seen[-1].stop_strings.completed_by_last(seen[-1].prompt, first.new_tokens[0][:1])
