"""Rows without a possible token, because logits are NaN or processors forbid all, fail alone and at the same place."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList

import skipstone
from skipstone.decoding.noise import Noise
from skipstone.engines.greedy_tokens import NO_TOKEN
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native import library
from tests.helpers import families, support
from tests.helpers.pairwise import slow_except

ENGINES = ["eager", pytest.param("native", marks=pytest.mark.skipif(library.missing() is not None, reason="not built"))]
SAMPLED = {"do_sample": True, "temperature": 0.8}
SETTINGS: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": SAMPLED, "few": {**SAMPLED, "top_k": 5}}
PROMPTS = torch.tensor([[3, 4, 5, 6, 3, 4], [7, 8, 3, 9, 7, 8]])
NEW = 12
HELPER = {"draft_model": families.build("llama"), "rejection_sample_method": "coupled"}
METHODS: dict[str, Any] = {
    **{name: name for name in ("autoregressive", "prompt_lookup", "swift", "jacobi", "lookahead", "recycle", "auto")},
    "layerskip": "layerskip exit_layer=1",
    "self_speculative": "self_speculative skip_mlp=1",
    "adadecode": "adadecode heads=original",
    "speculative": skipstone.Speculative(**HELPER),
    "adasd": skipstone.AdaSD(**HELPER),
}


class Forbid:
    """Forbids every token of texts that begin with `first`, once they have so many tokens."""

    def __init__(self, length: int, first: int) -> None:
        self.length, self.first = length, first

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        forbids = ids.shape[1] >= self.length and int(ids[0, 0]) == self.first
        return torch.full_like(scores, float("-inf")) if forbids else scores


def written(model: Any, method: Any, engine: str, ids: Tensor = PROMPTS, **options: Any) -> tuple[Any, dict[int, str]]:
    try:
        return skipstone.generate(model, ids, method, max_new_tokens=NEW, engine=engine, seed=3, **options).new_tokens, {}
    except skipstone.RowError as error:
        return error.output and error.output.new_tokens, error.errors


def broken(token: int) -> Any:
    model = families.build("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = float("nan")
    return model


def cut(row: list[int], token: int) -> list[int]:
    return row[: row.index(token) + 1] if token in row else row


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_nan_logits_fail_the_row_and_not_the_batch(engine: str, setting: str) -> None:
    options, model = SETTINGS[setting], families.build("llama")
    whole, none = written(model, "autoregressive", engine, **options)
    assert not none
    bad = whole[1][5]
    ids = torch.cat([PROMPTS, torch.tensor([[1, 2, 3, 1, 2, bad]])])  # the last one fails at its prompt
    found, errors = written(broken(bad), "autoregressive", engine, ids, **options)
    assert found == [cut(whole[0], bad), cut(whole[1], bad), []]
    assert set(errors) == {row for row in (0, 1) if bad in whole[row]} | {2}
    assert all("not finite" in why and "float32" in why for why in errors.values())


CELLS = list(itertools.product(METHODS, SETTINGS))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("name", "setting"), slow_except((), CELLS, full=CELLS[::2]))
def test_every_method_fails_at_the_same_place(name: str, engine: str, setting: str) -> None:
    options, model, method = SETTINGS[setting], families.build("llama"), METHODS[name]
    whole, _ = written(model, method, engine, **options)
    bad = whole[1][5]
    found, errors = written(broken(bad), method, engine, **options)
    assert found == [cut(row, bad) for row in whole]
    assert 1 in errors
    forbidding = {"logits_processor": LogitsProcessorList([Forbid(10, 7)]), **options}
    found, errors = written(model, method, engine, **forbidding)
    assert (found, set(errors)) == ([whole[0], whole[1][:4]], {1})


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["layerskip", "lookahead"])
def test_a_processor_that_forbids_every_token_fails_its_row(name: str, engine: str) -> None:
    model, method = families.build("llama"), METHODS[name]
    whole, _ = written(model, method, engine)
    found, errors = written(model, method, engine, logits_processor=LogitsProcessorList([Forbid(10, 7)]))
    assert (found, set(errors)) == ([whole[0], whole[1][:4]], {1})
    assert "processors" in errors[1]
    assert "allow" in errors[1]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_draft_model_that_says_nan_ends_the_draft_and_no_text(engine: str) -> None:
    model, draft = families.build("llama"), families.build("llama")
    ModelRunner(draft)
    with torch.no_grad():
        draft.get_input_embeddings().weight[40:] = float("nan")
    for setting, rule in itertools.product(({}, SAMPLED), ("coupled", "standard")):
        method = skipstone.Speculative(draft_model=draft, rejection_sample_method=rule)
        found, errors = written(model, method, engine, **setting)
        assert not errors
        if rule == "coupled":
            assert found == written(model, "autoregressive", engine, **setting)[0]
        assert all(len(row) == NEW and min(row) >= 0 for row in found)


def test_a_stream_tells_of_every_step_before_the_error() -> None:
    whole, _ = written(families.build("llama"), "autoregressive", "eager")
    bad, streamed = whole[1][5], [list[int](), list[int]()]
    with pytest.raises(skipstone.RowError, match="row 1"):  # noqa: PT012
        for step in skipstone.stream(broken(bad), PROMPTS, "autoregressive", max_new_tokens=NEW, engine="eager"):
            for row, tokens in enumerate(step.tokens):
                streamed[row] += tokens
    assert streamed == [cut(row, bad) for row in whole]


def test_texts_of_the_other_rows_are_with_the_error() -> None:
    model, options = broken(28), {"tokenizer": support.tokenizer(), "max_new_tokens": 4, "engine": "eager"}  # 28: z
    alone = skipstone.generate(model, ["abc"], "autoregressive", **options)
    with pytest.raises(ValueError, match=r"row 1.*embed_tokens") as caught:
        skipstone.generate(model, ["abc", "adz"], "autoregressive", **options)
    error: Any = caught.value
    assert error.output.text[0] == alone.text[0]  # type: ignore[index]


@pytest.mark.parametrize("rows", [1, 2])
def test_a_draw_from_no_distribution_is_no_token(rows: int) -> None:
    noise, place = Noise(torch.arange(rows)), torch.full((rows,), 5)
    for value in (float("nan"), 0.0):
        assert noise.draw(torch.full((rows, 8), value), place, 0).tolist() == [NO_TOKEN] * rows
        tokens = torch.arange(8).expand(rows, 8)
        assert noise.draw_among(tokens, torch.full((rows, 8), value), place, 0).tolist() == [NO_TOKEN] * rows
