"""Random trees through the real loop: whatever is proposed, the text is the target's own, token for token."""

from dataclasses import replace
from typing import Any

import pytest
from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

from skipstone import Autoregressive, Request, Sampling, Stats, Step
from skipstone.engines.model_runner import ModelRunner
from tests.helpers import planted
from tests.helpers.machine import decode, llama, mistral, prompt
from tests.helpers.pairwise import pairwise
from tests.helpers.trees import Trees, reference

MODELS = [pytest.param(llama, id="llama"), pytest.param(lambda: mistral(window=7), id="sliding")]
SAMPLING = [
    pytest.param({}, id="greedy"),
    pytest.param({"temperature": 1.0}, id="sampled"),
    pytest.param({"temperature": 0.8, "top_p": 0.9}, id="warped"),
]
PROCESSORS: tuple[Any, ...] = (RepetitionPenaltyLogitsProcessor(1.3), NoRepeatNGramLogitsProcessor(3))


def requests(lengths: tuple[int, ...], tokens: int = 16, **sampling: Any) -> list[Request]:
    return [
        Request(prompt(length, length), tokens + 3 * row, sampling=Sampling(seed=40 + row, **sampling))
        for row, length in enumerate(lengths)
    ]


def references(runner: ModelRunner, asked: list[Request]) -> tuple[list[list[int]], tuple[tuple[int, ...], ...]]:
    texts, _, _ = decode(Autoregressive(), runner, asked)
    return texts, tuple(reference(request.prompt, text) for request, text in zip(asked, texts, strict=True))


def proves(build: Any, asked: list[Request], method: Trees, check: bool = False) -> tuple[Stats, list[Step]]:
    runner = ModelRunner(build())
    expected, paths = references(runner, asked)
    texts, figures, steps = decode(replace(method, references=paths), runner, asked, check=check)
    assert texts == expected
    assert figures.drafted > 0
    assert figures.accepted > 0
    assert figures.drafted > figures.accepted
    assert any("recovered" in origin for step in steps for origin in step.origin)
    return figures, steps


@pairwise(
    build=MODELS,
    lengths=[pytest.param((9,), id="one row"), pytest.param((4, 17, 9), id="three rows")],
    processors=[pytest.param((), id="plain"), pytest.param(PROCESSORS, id="processors")],
    sampling=SAMPLING,
)
def test_random_trees_do_not_change_the_text(build: Any, lengths: tuple[int, ...], processors: Any, sampling: Any) -> None:
    asked = requests(lengths, tokens=40 if len(lengths) == 1 else 16, processors=processors, **sampling)
    for branching in (0.4, 0.0, 1.0) if len(lengths) == 3 else (0.4,):  # trees, chains, bushes
        figures, _ = proves(build, asked, Trees(nodes=16, branching=branching, peeking=0.75), check=True)
        assert max(figures.histogram) >= (3 if branching < 1 else 1), "a deep path was accepted"


def test_nodes_that_may_not_be_accepted_change_nothing() -> None:
    """Barred nodes are scored, count in verified_nodes and are never accepted nor counted as drafts."""
    figures, steps = proves(llama, requests((4, 17, 9), temperature=1.0), Trees(nodes=12, barred=0.4), check=True)
    assert figures.verified_nodes > figures.drafted
    _, paths = references(runner := ModelRunner(llama()), requests((8,)))
    _, figures, steps = decode(Trees(nodes=12, barred=1.0, references=paths), runner, requests((8,)))
    assert figures.verified_nodes > 20
    assert (figures.drafted, figures.accepted) == (0, 0)
    assert {origin for step in steps for row in step.origin for origin in row} == {"prefill", "bonus"}


@pytest.mark.parametrize("sampling", [SAMPLING[0], pytest.param({"temperature": 1.0}, marks=pytest.mark.slow)])
def test_an_end_token_inside_a_tree_ends_the_row_there(sampling: Any) -> None:
    """The end token of each row is one that lies inside an accepted path: what follows it in the path is cut."""
    runner = ModelRunner(llama())
    asked = requests((4, 17, 9), **sampling)
    texts, paths = references(runner, asked)
    cuts = 0
    for place in range(1, 14):
        ends = [frozenset({text[place]}) for text in texts]
        ending = [replace(request, eos=eos) for request, eos in zip(asked, ends, strict=True)]
        expected = [
            text[: 1 + next(i for i, token in enumerate(text) if token in eos)] for text, eos in zip(texts, ends, strict=True)
        ]
        found, _, steps = decode(Trees(nodes=10, references=paths), runner, ending, check=True)
        assert found == expected
        for step in steps:
            assert all(len(origin) == len(tokens) for origin, tokens in zip(step.origin, step.tokens, strict=True))
            cuts += sum(step.origin[row][-1] == "draft" for row in step.finished)
    assert cuts > 3, "a row ended on an accepted draft"


def sampled_trees() -> None:
    proves(llama, requests((4, 17, 9), temperature=1.0), Trees(nodes=10), check=True)


@planted.found_by(
    (planted.barred_nodes_accepted, test_nodes_that_may_not_be_accepted_change_nothing),
    (planted.accepted_path_not_moved, sampled_trees),
    (planted.siblings_see_one_another, sampled_trees),
    (planted.trash_in_slot_zero, sampled_trees),
    (planted.only_the_last_token_can_end, lambda: test_an_end_token_inside_a_tree_ends_the_row_there({})),
)
@pytest.mark.usefixtures("eager_engine")
def test_planted_bugs_are_found(plant: Any, proof: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.assert_found(plant, proof, monkeypatch)
