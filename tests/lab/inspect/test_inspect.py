"""What every layer knows, what an exit is expected to bring, and a picture of a text's decisions."""

from pathlib import Path

import pytest
import torch

from skipstone.engines.model_runner import ModelRunner
from skipstone.lab.inspect import policy_replay
from skipstone.lab.inspect.lens import ExitForecast, expectations, look, through
from skipstone.lab.inspect.policy_replay import ReplayedDecision
from skipstone.lab.timing.measure import PassTimes
from skipstone.methods.adadecode.heads import ExitHeads, new_card
from skipstone.policy.choose_drafter import Decision, StepResult
from tests.helpers import families
from tests.helpers.machine import prompt


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_last_layer_writes_the_text_and_others_are_models_cut_short(name: str) -> None:
    model = families.cached(name)
    asked = [torch.as_tensor(one) for one in families.prompts(2)]
    found = look(model, asked, 8)
    assert found.top[-1] == found.tokens
    assert (len(found.tokens), found.breaks, found.agreement[-1]) == (16, [0, 8], 1.0)
    assert all(found.top[layer - 1][i] == found.tokens[i] for i, layer in enumerate(found.first))
    assert all(found.top[layer - 2][i] != found.tokens[i] for i, layer in enumerate(found.first) if layer > 1)


@pytest.mark.parametrize("engine", ["native", "eager"])
def test_weights_in_bfloat16_can_be_looked_at(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIPSTONE_ENGINE", engine)
    model = families.build("llama").to(torch.bfloat16)
    assert ModelRunner(model).engine.name == engine
    found = look(model, [prompt(9, vocab=50)], 8)
    assert len(found.tokens) == len(found.top[0]) == 8
    assert engine == "eager" or found.top[-1] == found.tokens


def test_layers_in_between_are_those_of_a_model_cut_there() -> None:
    model, ids = families.build("llama"), prompt(9, vocab=50)
    found = look(model, [ids], 6)
    text = torch.cat([ids, torch.tensor(found.tokens)])[None]
    for exit_layer in (1, 2, 3):
        model.config.num_hidden_layers = exit_layer
        with torch.no_grad():
            best = model(text).logits[0, 8:-1].softmax(-1).max(-1)
        model.config.num_hidden_layers = 4
        assert best.indices.tolist() == found.top[exit_layer - 1]
        assert best.values.tolist() == pytest.approx(found.probability[exit_layer - 1], rel=1e-4)


def test_expected_speed_ups_by_hand() -> None:
    """Ten layers of 1, a head of 1, scoring at the price of one token."""
    costs = PassTimes([1.0] * 10, 1.0, {1: 10.0, 3: 10.0})
    found = expectations([0.0, 0.5, 1.0] + [1.0] * 7, costs)
    assert len(found) == 9
    assert found[0] == ExitForecast(1, 0.0, 1, pytest.approx(11 / (2 + 1 + 9 + 1)))
    two = {d: (1 - 0.5 ** (d + 1)) / 0.5 * 11 / (3 * d + 2 + 8 + 1) for d in (1, 3)}
    assert found[1] == ExitForecast(2, 0.5, max(two, key=two.__getitem__), pytest.approx(max(two.values())))
    assert found[2] == ExitForecast(3, 1.0, 3, pytest.approx(4 * 11 / (3 * 4 + 3 + 7 + 1)))


def test_a_prompt_up_to_the_end_of_the_models_positions_can_be_looked_at() -> None:
    assert len(look(families.build("gpt2", max_position_embeddings=32), [prompt(28, vocab=50)], 4).tokens) == 4


def test_through_exit_heads_each_exit_is_read_by_its_own() -> None:
    """Against float64 softmax over E* T norm(h), with states by transformers' own hidden_states."""
    model = families.cached("llama")
    runner = ModelRunner(model)
    heads = ExitHeads(new_card(runner, (1, 3), "square"))
    torch.manual_seed(0)
    with torch.no_grad():
        for one in heads.parameters():
            one += 0.05 * torch.randn_like(one)
    pairs = [(torch.as_tensor(ids), torch.tensor([3, 7, 5 + place])) for place, ids in enumerate(families.prompts(2))]
    found = through(model, heads, pairs)
    assert found.layers == [1, 3, 4]
    transforms = [head.weight.double() for head in heads.heads]
    for reading, read in ((found.own, [torch.eye(32).double()] * 2), (found.trained, transforms)):
        rows = []
        for prompt_ids, new in pairs:
            with torch.no_grad():
                out = model(torch.cat([prompt_ids, new])[None], output_hidden_states=True)
                span = slice(len(prompt_ids) - 1, len(prompt_ids) + 2)
                normed = [model.model.norm(out.hidden_states[layer][0, span]).double() for layer in (1, 3)]
                said = [state @ one.T @ model.lm_head.weight.double().T for state, one in zip(normed, read, strict=True)]
                rows.append([*(one.log_softmax(-1) for one in said), out.logits[0, span].double().log_softmax(-1)])
        final = torch.cat([row[-1] for row in rows])
        new = torch.cat([new for _, new in pairs])
        for place in range(3):
            said = torch.cat([row[place] for row in rows])
            divergence = (final.exp() * (final - said)).sum(-1).mean()
            assert reading.probability[place] == pytest.approx(said[range(6), new].exp().tolist(), rel=1e-4)
            assert reading.divergence[place] == pytest.approx(float(divergence), rel=1e-3, abs=1e-9)
            assert reading.agreement[place] == pytest.approx(float((said.argmax(-1) == final.argmax(-1)).double().mean()))
    assert found.trained.divergence[0] != pytest.approx(found.own.divergence[0], rel=1e-2)


def decided(position: int, kind: str, tokens: float, seconds: float, replay: float = 0.0, steps: int = 1) -> ReplayedDecision:
    decision = Decision(kind)
    return ReplayedDecision(position, decision, decision, [StepResult(tokens, seconds, steps)], replay, 1e-5, 1e-5, 0.0)


STEPS = [
    decided(0, "plain", 1, 0.010),
    decided(1, "lookup", 5, 0.020),
    decided(6, "plain", 1, 0.012, replay=0.005),
    decided(7, "probe", 1, 0.010),
    decided(8, "plain", 4, 0.040, steps=4),
]


def test_what_was_won_is_tokens_less_time_in_plain_steps(tmp_path: Path) -> None:
    """A plain step takes 10 ms: 0, then 5 - 2 more, then 1 - 1.7 more, then nothing, four steps at once among it."""
    assert policy_replay.cumulative_gain(STEPS) == pytest.approx([0.0, 3.0, 2.3, 2.3, 2.3])
    lines, _ = policy_replay.figure(STEPS).axes
    assert [label.get_text() for label in lines.get_yticklabels()] == ["plain", "lookup", "probe"]
    policy_replay.save(STEPS, tmp_path / "decisions.png")
    assert (tmp_path / "decisions.png").read_bytes().startswith(b"\x89PNG")
