"""Perplexity and agreement of every exit against plain loops over the model's own hidden states."""

import math
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from skipstone.engines.exit_statistics import ExitTally
from skipstone.train.data.rows import IGNORED
from skipstone.train.layerskip.metrics import exit_quality, flat
from tests.helpers import families
from tests.helpers.objectives import HEADS

ROWS, LENGTH = 5, 12
Rows = list[dict[str, Tensor]]


def rows(padded: bool = False) -> Rows:
    """Rows of which the first ones predict fewer tokens, so that a mean of means is another number."""
    generator = torch.Generator().manual_seed(7)
    out = []
    for index in range(ROWS):
        ids = torch.randint(1, 97, (LENGTH,), generator=generator)
        labels, mask = ids.clone(), torch.ones(LENGTH, dtype=torch.long)
        labels[: max(0, 8 - 3 * index)] = IGNORED
        labels[9] = IGNORED
        if padded:
            mask[:index] = 0
            labels[: index + 1] = IGNORED
        out.append({"input_ids": ids, "labels": labels, **({"attention_mask": mask} if padded else {})})
    return out


@torch.no_grad()
def explicit(name: str, model: Any, data: Rows) -> tuple[dict[int, float], dict[int, float], int]:
    """(perplexity, agreement, tokens) by exit layer E, token by token."""
    depth = model.config.num_hidden_layers
    nats, same, count = dict.fromkeys(range(1, depth + 1), 0.0), dict.fromkeys(range(1, depth + 1), 0), 0
    for row in data:
        mask = row["attention_mask"][None] if "attention_mask" in row else None
        out = model(row["input_ids"][None], attention_mask=mask, output_hidden_states=True)
        exits = {layer: HEADS[name](model, out.hidden_states[layer])[0] for layer in range(1, depth)} | {depth: out.logits[0]}
        for position in range(LENGTH - 1):
            if (token := int(row["labels"][position + 1])) != IGNORED:
                count += 1
                for layer, logits in exits.items():
                    nats[layer] -= float(logits[position].double().log_softmax(-1)[token])
                    same[layer] += int(logits[position].argmax() == out.logits[0, position].argmax())
    return (
        {layer: math.exp(total / count) for layer, total in nats.items()},
        {layer: total / count for layer, total in same.items()},
        count,
    )


def assert_quality(found: ExitTally, perplexity: dict[int, float], agreement: dict[int, float], tokens: int) -> None:
    assert found.tokens == tokens
    assert found.perplexity() == pytest.approx(perplexity, rel=1e-4)
    assert found.agreement() == agreement


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "gemma3n_text"])
def test_every_exit_is_measured_as_by_hand(name: str) -> None:
    model, data = families.cached(name), rows()
    perplexity, agreement, tokens = explicit(name, model, data)
    assert tokens == 3 + 6 + 9 + 10 + 10
    assert len({f"{value:.4g}" for value in perplexity.values()}) == 4, "the exits do not differ"
    assert 0 < agreement[3] < 1 == agreement[4]
    sizes = [{}] if name != "llama" else [{}, {"batch_size": 2, "chunk": 5}, {"batch_size": 3, "chunk": 1}, {"chunk": 24}]
    for size in sizes:
        assert_quality(exit_quality(model, data, **size), perplexity, agreement, tokens)


def test_padded_rows_are_measured_with_their_mask() -> None:
    model, data = families.cached("llama"), rows(padded=True)
    expected = explicit("llama", model, data)
    assert_quality(exit_quality(model, data, 3), *expected)
    bare = [{name: row[name] for name in ("input_ids", "labels")} for row in data]
    assert exit_quality(model, bare, 3).perplexity()[4] != pytest.approx(expected[0][4], rel=1e-3)


def test_an_adapter_is_measured_with_its_model() -> None:
    settings = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=4, init_lora_weights=False)
    wrapper: Any = peft.get_peft_model(families.build("llama"), settings)
    own = explicit("llama", wrapper.get_base_model().eval(), rows())
    assert own[0] != pytest.approx(explicit("llama", families.cached("llama"), rows())[0], rel=1e-2)
    assert_quality(exit_quality(wrapper, rows()), *own)


def test_only_the_chosen_exits_and_the_last_are_measured() -> None:
    model, data = families.cached("llama"), rows()
    perplexity, agreement, tokens = explicit("llama", model, data)
    given: list[bool] = []
    head: Any = model.get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda *_: given.append(torch.is_grad_enabled()))
    for exits, chosen in (((2,), (2, 4)), ((4, 1, 1), (1, 4)), ((), (4,))):
        given.clear()
        found = exit_quality(model, data, exits=exits)
        assert given == [False] * len(chosen), "the head was run for other exits, or with a graph"
        expected = {layer: perplexity[layer] for layer in chosen}, {layer: agreement[layer] for layer in chosen}
        assert list(found.perplexity()) == list(chosen)
        assert_quality(found, *expected, tokens)
    handle.remove()


def test_the_model_is_left_as_it_was_and_measured_without_its_dropout() -> None:
    model, data = families.build("gpt2", resid_pdrop=0.5), rows()
    expected = explicit("gpt2", model, data)
    for training in (True, False):
        model.train(training)
        assert_quality(exit_quality(model, data), *expected)
        assert model.training is training
    model.train()
    with pytest.raises(KeyError):
        exit_quality(model, [{"input_ids": data[0]["input_ids"]}])
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert all("forward" not in layer.__dict__ for layer in model.transformer.h)


def test_an_exit_that_knows_nothing_has_an_infinite_perplexity_and_no_error() -> None:
    model: Any = families.build("llama")
    head: PreTrainedModel = model.get_output_embeddings()
    with torch.no_grad():
        head.weight.mul_(1e5)
    found = exit_quality(model, rows())
    assert found.perplexity()[4] == math.inf
    assert found.agreement()[4] == 1
    assert flat(found)["loss"] == math.inf


def test_what_cannot_be_measured_is_refused() -> None:
    model, data = families.cached("llama"), rows()
    nothing = [{**row, "labels": torch.full((LENGTH,), IGNORED)} for row in data]
    first = [{**row, "labels": torch.cat([row["labels"][:1], torch.full((LENGTH - 1,), IGNORED)])} for row in data]
    for given, options, words in (
        (data, {"exits": (0, 2)}, r"between 1 and 4, found \[0\]"),
        (nothing, {}, "nothing to measure"),
        (first, {}, "nothing to measure"),
    ):
        with pytest.raises(ValueError, match=words):
            exit_quality(model, given, **options)
