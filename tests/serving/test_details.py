"""What a step's details say: by hand for drafts made here, and as a page gets them from the bundled model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

import skipstone
from skipstone.decoding.draft import Draft, RowVerdict
from skipstone.engines.model_runner import ModelRunner
from skipstone.methods import resolve
from skipstone.serving.batch_group import BatchGroup
from skipstone.serving.completions_api import step_json
from skipstone.serving.logprobs import TokenReader
from skipstone.serving.pending_request import StepOutput
from skipstone.serving.request_parser import RequestParser
from skipstone.serving.schemas import CompletionBody
from skipstone.serving.server import Server
from skipstone.serving.settings import ServerSettings
from skipstone.serving.step_details import MAX_BRANCHES, StepDetails, describe_layers, describe_step
from tests.helpers.served import InThread

PROMPT = 'def fibonacci(n):\n    """The n-th number of Fibonacci."""\n'
DEPTH = 8


def draft(tokens: list[int], parents: list[int] | None = None, **more: Any) -> Draft:
    """Of one row, all of whose nodes may be accepted."""
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
    """Its probability under those logits."""
    return pytest.approx((token + 1) / 55, abs=1e-6)


def test_of_a_chain_what_follows_the_first_refused_draft_was_never_looked_at() -> None:
    found = told(draft([3, 4, 5, 6], confidence=torch.tensor([[0.9, 0.8, 0.7, 0.6]]), exit_layer=2), [0], 9)
    assert [(one.token, one.model, one.layer) for one in found.tokens] == [(3, chance(3), 2), (9, chance(9), None)]
    assert [one.drafter for one in found.tokens] == [pytest.approx(0.9), None]
    (branch,) = found.rejected
    assert branch.place == 1
    assert [(one.token, one.model) for one in branch.tokens] == [(4, chance(4)), (5, None), (6, None)]
    assert [one.drafter for one in branch.tokens] == [pytest.approx(value) for value in (0.8, 0.7, 0.6)]
    assert {one.layer for one in branch.tokens} == {2}


def test_of_a_tree_every_branch_stands_at_the_place_of_its_first_node() -> None:
    #   root -> 0 -> 1 -> 2 (accepted: 0, 1), 3 beside 0, 4 behind 3, 5 beside 1, 6 beside 4
    found = told(draft([1, 2, 3, 4, 5, 6, 7], [-1, 0, 1, -1, 3, 0, 3]), [0, 1], 9)
    branches = [(one.place, [(seen.token, seen.model) for seen in one.tokens]) for one in found.rejected]
    assert branches == [(2, [(3, chance(3))]), (0, [(4, chance(4)), (5, None)]), (1, [(6, chance(6))]), (1, [(7, None)])]
    assert all(one.drafter is None and one.layer is None for branch in found.rejected for one in branch.tokens)


def test_a_tree_with_many_branches_says_how_many_it_leaves_out() -> None:
    found = told(draft([1] * 30, [-1] * 30), [], 9)
    assert (len(found.rejected), found.left_out) == (MAX_BRANCHES, 30 - MAX_BRANCHES)


def test_nothing_is_refused_where_a_text_ends_within_its_draft_or_a_node_is_no_candidate() -> None:
    assert told(draft([3, 4, 5]), [0, 1], None).rejected == []
    assert told(draft([3, 4], candidate=torch.tensor([[True, False]])), [0], 9).rejected == []


def test_the_drafters_probability_is_what_it_drew_from_and_else_its_confidence_where_it_was_greedy() -> None:
    q = torch.full((1, 2, 10), 0.05)
    q[0, 0, 3] = 0.55
    drawn = told(draft([3, 4], q=q, stochastic=torch.tensor([[True, False]])), [0], 9, greedy=False)
    assert drawn.tokens[0].drafter == pytest.approx(0.55)
    assert drawn.rejected[0].tokens[0].drafter is None  # its q is one-hot, and no probability
    coupled = told(draft([3, 4], confidence=torch.tensor([[0.9, 0.8]])), [0], 9, greedy=False)
    assert (coupled.tokens[0].drafter, coupled.tokens[0].confidence) == (None, pytest.approx(0.9))


def test_what_was_kept_against_the_models_choice_is_marked() -> None:
    found = told(draft([3, 4, 5]), [0, 1], 9, against=[0, 1, 0])
    assert [one.overruled for one in found.tokens] == [False, True, False]


def test_drafts_of_all_layers_are_of_no_exit_and_exits_may_differ_by_token() -> None:
    assert told(draft([3], exit_layer=DEPTH), [0], 9).tokens[0].layer is None
    found = told(draft([3, 4], exit_layer=torch.tensor([[2, 6]])), [0, 1], 9)
    assert [one.layer for one in found.tokens] == [2, 6, None]


# ------------------------------------------------------------------------------------------------- the bundled model


@pytest.fixture(scope="module")
def both() -> tuple[Any, Any]:
    return skipstone.load(None)


@pytest.fixture(scope="module")
def loaded(both: tuple[Any, Any]) -> tuple[ModelRunner, Any]:
    model, tokenizer = both
    return ModelRunner(model), tokenizer


def steps(loaded: tuple[ModelRunner, Any], method: str, **more: Any) -> Iterator[dict[str, Any]]:
    """What a page is told of every step."""
    model, tokenizer = loaded
    body = {"max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True, "stream_speculative": "full"}
    asked = CompletionBody(prompt=PROMPT, **{**body, **more}, speculative=method)
    parser = RequestParser(model, tokenizer, resolve("autoregressive"), 256)
    (pending,) = parser.parse(asked)
    pieces: list[StepOutput] = []
    group = BatchGroup(
        model, pending.method, 2, 256, 64, lambda _, event: pieces.append(event) if isinstance(event, StepOutput) else None
    )
    group.admit(pending)
    while group.busy:
        group.step()
    return (step_json(piece, TokenReader(tokenizer)) for piece in pieces)


def test_only_full_is_told_details_and_true_stays_as_it_was(loaded: tuple[ModelRunner, Any]) -> None:
    keys = {"step", "tokens", "drafted", "drafter", "reason", "draft_ms", "verify_ms"}
    for asked in (True, False):
        found = list(steps(loaded, "layerskip exit_layer=6", stream_speculative=asked))
        assert {frozenset(step) for step in found} == {frozenset(keys)}
        assert {frozenset(token) for step in found for token in step["tokens"]} == {frozenset({"id", "text", "origin"})}


def test_a_text_is_the_same_with_details(loaded: tuple[ModelRunner, Any]) -> None:
    for method in ("layerskip exit_layer=6", "adadecode", "prompt_lookup", "swift"):
        for more in ({"max_tokens": 24}, {"max_tokens": 24, "temperature": 1.0, "seed": 3}):
            texts = [
                [token["id"] for step in steps(loaded, method, stream_speculative=asked, **more) for token in step["tokens"]]
                for asked in ("full", True)
            ]
            assert texts[0] == texts[1], method


def test_probabilities_are_those_of_a_forward_over_the_text(loaded: tuple[ModelRunner, Any]) -> None:
    model, tokenizer = loaded
    found = list(steps(loaded, "layerskip exit_layer=6 confidence_threshold=0.3"))
    tokens = [token for step in found for token in step["tokens"]]
    prompt = tokenizer(PROMPT)["input_ids"]
    ids = torch.tensor([prompt + [token["id"] for token in tokens]])
    with torch.no_grad():
        chances = model.model(ids).logits[0].float().softmax(-1)
    for place, token in enumerate(tokens, len(prompt) - 1):
        assert token["p"] == pytest.approx(float(chances[place, token["id"]]), abs=2e-3)
    drafted = [token for token in tokens if token["origin"] == "draft"]
    refused = [token for step in found for branch in step["refused"] for token in branch["tokens"]]
    assert drafted
    assert refused
    assert all(0 < token["draft_p"] <= 1 for token in drafted + refused)
    before = [token for step in found for token in step["tokens"][: step["drafted"] - 1] if token["origin"] == "draft"]
    assert all(token["draft_p"] >= 0.3 for token in before), "only the last of a draft may be below the threshold"
    assert {token["layer"] for token in drafted + refused} == {6}
    at = len(prompt)
    judged = 0
    for step in found:
        for branch in step["refused"]:
            token = branch["tokens"][0]
            assert token["p"] == pytest.approx(float(chances[at + branch["at"] - 1, token["id"]]), abs=2e-3)
            assert token["id"] != step["tokens"][branch["at"]]["id"]
            judged += 1
        at += len(step["tokens"])
    assert judged


@pytest.mark.parametrize(
    ("method", "drafters"),
    [
        ("autoregressive", []),
        ("prompt_lookup", []),
        ("layerskip exit_layer=6", [("layerskip", [6], 0, None)]),
        ("early_exit exit_layer=5", [("early_exit", [5], 0, None)]),
        ("self_speculative skip_attention=3,4 skip_mlp=5", [("self_speculative", [], 3, None)]),
        ("self_speculative draft_quantize=int4", [("self_speculative", [], 0, "int4")]),
    ],
)
def test_layers_that_draft_are_named(loaded: tuple[ModelRunner, Any], method: str, drafters: list[Any]) -> None:
    model, _ = loaded
    if "int4" in method and model.engine.name != "native":
        pytest.skip("four bits need the native engine")
    one = resolve(method)
    found = describe_layers(one, one.start(model, 1, 64))
    assert found["count"] == model.depth
    assert found["lossless"] == one.lossless
    names = [
        (each["name"], each["exits"], len(each["skip_attention"]) + len(each["skip_mlp"]), each["quantize"])
        for each in found["drafters"]
    ]
    assert names == drafters


def test_layers_are_told_once_and_again_where_a_search_has_changed_them(loaded: tuple[ModelRunner, Any]) -> None:
    once = [step["layers"] for step in steps(loaded, "layerskip exit_layer=6") if "layers" in step]
    assert len(once) == 1
    told_layers = [step["layers"]["drafters"][0] for step in steps(loaded, "swift context_window=8") if "layers" in step]
    assert all(one["skip_attention"] or one["skip_mlp"] for one in told_layers)
    assert all(one != other for one, other in pairwise(told_layers))


def test_adadecodes_exits_and_those_of_autos_drafters_are_told(loaded: tuple[ModelRunner, Any]) -> None:
    found = list(steps(loaded, "adadecode"))
    exits = found[0]["layers"]["drafters"][0]["exits"]
    layers = {token["layer"] for step in found for token in step["tokens"] if token["origin"] == "draft"}
    assert layers
    assert layers <= set(exits)
    found = list(steps(loaded, "auto"))
    names = {one["name"] for one in found[0]["layers"]["drafters"]}
    assert names
    assert found[-1]["plain_ms"] > 0, "auto has timed plain steps"


def test_early_exits_own_tokens_are_of_their_layer(loaded: tuple[ModelRunner, Any]) -> None:
    found = list(steps(loaded, "early_exit exit_layer=5"))
    assert {token["layer"] for step in found for token in step["tokens"]} == {5}
    assert found[0]["layers"]["lossless"] is False


def test_details_go_over_http_and_another_word_for_them_is_refused(both: tuple[Any, Any]) -> None:
    server = InThread(Server(lambda: both, ServerSettings(max_num_seqs=1, drain_seconds=5)))
    body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "stream": True, "speculative": "layerskip exit_layer=6"}
    try:
        server.until_ready()
        refused = server.http.post("/v1/completions", json=body | {"stream_speculative": "some"})
        assert refused.status_code == 400
        assert "stream_speculative" in refused.json()["error"]["message"]
        lines = server.http.post("/v1/completions", json=body | {"stream_speculative": "full"}).text.splitlines()
    finally:
        server.stop()
    chunks = [json.loads(line[5:]) for line in lines if line.startswith("data: {")]
    found = [chunk["speculative"] for chunk in chunks if "speculative" in chunk]
    assert found[0]["layers"]["drafters"][0]["exits"] == [6]
    assert all(0 < token["p"] <= 1 for step in found for token in step["tokens"])
    assert any(step["refused"] for step in found)
