"""What a step's details say: by hand for drafts made here, and as a page gets them from the bundled model."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

from skipstone.decoding.draft import Draft, RowVerdict
from skipstone.engines.model_runner import ModelRunner
from skipstone.methods import resolve
from skipstone.serving.api_schemas import CompletionBody
from skipstone.serving.batch_group import BatchGroup
from skipstone.serving.completions_api import step_json
from skipstone.serving.logprobs import TokenReader
from skipstone.serving.pending_request import StepOutput
from skipstone.serving.request_parser import RequestParser
from skipstone.serving.step_details import MAX_BRANCHES, StepDetails, describe_layers, describe_step
from tests.helpers.served import InThread, refusal

PROMPT = 'def fibonacci(n):\n    """The n-th number of Fibonacci."""\n'
DEPTH = 8


def draft(tokens: list[int], parents: list[int] | None = None, **more: Any) -> Draft:
    one = torch.tensor([tokens])
    above = None if parents is None else torch.tensor([parents])
    return Draft(one, torch.ones_like(one, dtype=torch.bool), None, above, **more)


def told(one: Draft, path: list[int], own: int | None, greedy: bool = True, **more: Any) -> StepDetails:
    """The details of a row that accepted a path and added a token of its own, with logits of which token t has log(t + 1)."""
    tokens = [int(one.tokens[0, node]) for node in path] + ([] if own is None else [own])
    verdict = RowVerdict(path, tokens, "recovered", one.width, 0, **more)
    logits = torch.arange(1, 11).float().log().expand(len(tokens), 10)
    return describe_step(one, 0, verdict, logits, greedy=greedy, depth=DEPTH)


def chance(token: int) -> Any:
    return pytest.approx((token + 1) / 55, abs=1e-6)


def test_of_a_chain_what_follows_the_first_refused_draft_was_never_looked_at() -> None:
    result = told(draft([3, 4, 5, 6], confidence=torch.tensor([[0.9, 0.8, 0.7, 0.6]]), exit_layer=2), [0], 9)
    assert [(one.token, one.model, one.layer) for one in result.tokens] == [(3, chance(3), 2), (9, chance(9), None)]
    assert [one.drafter for one in result.tokens] == [pytest.approx(0.9), None]
    (branch,) = result.rejected
    assert branch.place == 1
    assert [(one.token, one.model) for one in branch.tokens] == [(4, chance(4)), (5, None), (6, None)]
    assert [one.drafter for one in branch.tokens] == [pytest.approx(value) for value in (0.8, 0.7, 0.6)]
    assert {one.layer for one in branch.tokens} == {2}


def test_of_a_tree_every_branch_stands_at_the_place_of_its_first_node() -> None:
    #   root -> 0 -> 1 -> 2 (accepted: 0, 1), 3 beside 0, 4 behind 3, 5 beside 1, 6 beside 4
    result = told(draft([1, 2, 3, 4, 5, 6, 7], [-1, 0, 1, -1, 3, 0, 3]), [0, 1], 9)
    branches = [(one.place, [(seen.token, seen.model) for seen in one.tokens]) for one in result.rejected]
    assert branches == [(2, [(3, chance(3))]), (0, [(4, chance(4)), (5, None)]), (1, [(6, chance(6))]), (1, [(7, None)])]
    assert all(one.drafter is None and one.layer is None for branch in result.rejected for one in branch.tokens)
    result = told(draft([1] * 30, [-1] * 30), [], 9)
    assert (len(result.rejected), result.left_out) == (MAX_BRANCHES, 30 - MAX_BRANCHES)
    # nothing is refused where a text ends within its draft, or where a node is no candidate
    assert told(draft([3, 4, 5]), [0, 1], None).rejected == []
    assert told(draft([3, 4], candidate=torch.tensor([[True, False]])), [0], 9).rejected == []


def test_layers_differ_by_token_and_tokens_against_the_models_choice_are_marked() -> None:
    result = told(draft([3, 4, 5], exit_layer=torch.tensor([[2, 6, DEPTH]])), [0, 1], 9, against=[0, 1, 0])
    assert [one.overruled for one in result.tokens] == [False, True, False]
    assert [one.layer for one in result.tokens] == [2, 6, None]
    assert told(draft([3], exit_layer=DEPTH), [0], 9).tokens[0].layer is None, "all layers are no exit"


def test_the_drafters_probability_is_what_it_drew_from_and_else_its_confidence_where_it_was_greedy() -> None:
    q = torch.full((1, 2, 10), 0.05)
    q[0, 0, 3] = 0.55
    drawn = told(draft([3, 4], q=q, stochastic=torch.tensor([[True, False]])), [0], 9, greedy=False)
    assert drawn.tokens[0].drafter == pytest.approx(0.55)
    assert drawn.rejected[0].tokens[0].drafter is None  # its q is one-hot, and no probability
    coupled = told(draft([3, 4], confidence=torch.tensor([[0.9, 0.8]])), [0], 9, greedy=False)
    assert (coupled.tokens[0].drafter, coupled.tokens[0].confidence) == (None, pytest.approx(0.9))


def steps(loaded: Any, method: str, **more: Any) -> Iterator[dict[str, Any]]:
    model, tokenizer = ModelRunner(loaded[0]), loaded[1]
    body = {"max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True, "stream_speculative": "full", **more}
    parser = RequestParser(model, tokenizer, resolve("autoregressive"), 256)
    (pending,) = parser.parse(CompletionBody(prompt=PROMPT, **body, speculative=method))
    pieces: list[Any] = []
    group = BatchGroup(model, pending.method, 2, 256, 64, lambda _, event: pieces.append(event))
    group.admit(pending)
    while group.busy:
        group.step()
    return (step_json(piece, TokenReader(tokenizer)) for piece in pieces if isinstance(piece, StepOutput))


def test_a_text_is_the_same_with_details_and_only_full_has_them(loaded: Any) -> None:
    keys = {"step", "tokens", "drafted", "drafter", "reason", "draft_ms", "verify_ms"}
    for method, more in (("layerskip exit_layer=6", {}), ("adadecode", {}), ("swift", {"temperature": 1.0, "seed": 3})):
        full, plain = (list(steps(loaded, method, stream_speculative=one, max_tokens=24, **more)) for one in ("full", True))
        texts = [[token["id"] for step in result for token in step["tokens"]] for result in (full, plain)]
        assert texts[0] == texts[1], method
        assert {frozenset(step) for step in plain} == {frozenset(keys)}
        assert {frozenset(token) for step in plain for token in step["tokens"]} == {frozenset({"id", "text", "origin"})}


def test_probabilities_are_those_of_a_forward_over_the_text(loaded: Any) -> None:
    model, tokenizer = loaded
    result = list(steps(loaded, "layerskip exit_layer=6 confidence_threshold=0.3"))
    tokens = [token for step in result for token in step["tokens"]]
    prompt = tokenizer(PROMPT)["input_ids"]
    with torch.no_grad():
        chances = model(torch.tensor([prompt + [token["id"] for token in tokens]])).logits[0].float().softmax(-1)
    for place, token in enumerate(tokens, len(prompt) - 1):
        assert token["p"] == pytest.approx(float(chances[place, token["id"]]), abs=2e-3)
    drafted = [token for token in tokens if token["origin"] == "draft"]
    refused = [token for step in result for branch in step["refused"] for token in branch["tokens"]]
    assert drafted
    assert refused
    assert all(0 < token["draft_p"] <= 1 and token["layer"] == 6 for token in drafted + refused)
    before = [token for step in result for token in step["tokens"][: step["drafted"] - 1] if token["origin"] == "draft"]
    assert all(token["draft_p"] >= 0.3 for token in before), "only the last of a draft may be below the threshold"
    at = len(prompt)
    for step in result:
        for branch in step["refused"]:
            token = branch["tokens"][0]
            assert token["p"] == pytest.approx(float(chances[at + branch["at"] - 1, token["id"]]), abs=2e-3)
            assert token["id"] != step["tokens"][branch["at"]]["id"]
        at += len(step["tokens"])


@pytest.mark.parametrize(
    ("method", "drafters"),
    [
        ("prompt_lookup", []),
        ("early_exit exit_layer=5", [("early_exit", [5], 0, None)]),
        ("self_speculative skip_attention=3,4 skip_mlp=5", [("self_speculative", [], 3, None)]),
        ("self_speculative draft_quantize=int4", [("self_speculative", [], 0, "int4")]),
    ],
)
def test_layers_that_draft_are_named(loaded: Any, method: str, drafters: list[Any]) -> None:
    model, one = ModelRunner(loaded[0]), resolve(method)
    if "int4" in method and model.engine.name != "native":
        pytest.skip("four bits need the native engine")
    result = describe_layers(one, one.start(model, 1, 64))
    assert (result["count"], result["lossless"]) == (model.depth, one.lossless)
    names = [
        (each["name"], each["exits"], len(each["skip_attention"]) + len(each["skip_mlp"]), each["quantize"])
        for each in result["drafters"]
    ]
    assert names == drafters


def test_layers_are_told_once_and_again_where_a_search_has_changed_them(loaded: Any) -> None:
    first, *later = steps(loaded, "adadecode", max_tokens=30)
    assert not any("layers" in step for step in later)
    layers = {token["layer"] for step in later for token in step["tokens"] if token["origin"] == "draft"}
    assert set() < layers <= set(first["layers"]["drafters"][0]["exits"])
    result = list(steps(loaded, "auto", max_tokens=30))
    assert all(one["name"] for one in result[0]["layers"]["drafters"])
    assert result[-1]["plain_ms"] > 0, "auto has timed plain steps"
    told_layers = [step["layers"]["drafters"][0] for step in steps(loaded, "swift context_window=8") if "layers" in step]
    assert all(one["skip_attention"] or one["skip_mlp"] for one in told_layers)
    assert all(one != other for one, other in pairwise(told_layers))


def test_details_go_over_http_and_another_word_for_them_is_refused(nano: InThread) -> None:
    body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "stream": True, "speculative": "layerskip exit_layer=6"}
    refused = nano.http.post("/v1/completions", json=body | {"stream_speculative": "some"})
    assert "stream_speculative" in refusal(refused)
    chunks = nano.chunks(body | {"stream_speculative": "full"})
    result = [chunk["speculative"] for chunk in chunks if "speculative" in chunk]
    assert result[0]["layers"]["drafters"][0]["exits"] == [6]
    assert all(0 < token["p"] <= 1 for step in result for token in step["tokens"])
    assert any(step["refused"] for step in result)
