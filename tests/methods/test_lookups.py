"""Drafts without a drafter: what stood in the text before, blocks of guesses, windows and pools of n-grams."""

import copy
import functools
import itertools
import random
from typing import Any

import pytest
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import skipstone
from skipstone import Auto, Autoregressive, Jacobi, LayerSkip, Lookahead, Method, PromptLookup, Recycle, Sampling
from skipstone.decoding.draft import RowVerdict
from skipstone.decoding.loop import run
from skipstone.decoding.request import Request
from skipstone.engines import host_transfer
from skipstone.engines.model_runner import ModelRunner
from skipstone.methods.prompt_lookup import AT_FIRST, NgramIndex, PredictedText
from skipstone.methods.recycle import shape
from tests.helpers import families
from tests.helpers.machine import decode, llama, prompt, start
from tests.helpers.pairwise import slow_except
from tests.helpers.support import assert_as_plain

pytestmark = pytest.mark.filterwarnings("ignore:.*x the speed of plain decoding:RuntimeWarning")


def forgetful(model: Any) -> Any:
    """A copy with a twentieth of the attention. The last token decides the next one, so it soon repeats itself."""
    other = copy.deepcopy(model)
    runner = ModelRunner(other)
    for layer in runner.layers:
        getattr(layer, runner.family.attention).register_forward_hook(
            lambda _, __, output: (0.05 * output[0], *output[1:]) if isinstance(output, tuple) else 0.05 * output
        )
    return other


@pytest.fixture(scope="module")
def model() -> Any:
    return forgetful(llama())


def sought(text: list[int], shortest: int, longest: int, most: int, first: bool) -> list[int]:
    """What `NgramIndex.find` returns, by looking everywhere."""
    for size in range(min(longest, len(text) - 1), shortest - 1, -1):
        places = [at for at in range(len(text) - size) if text[at : at + size] == text[-size:]]
        if places:
            start = (places[0] if first else places[-1]) + size
            found = text[start : start + most]
            period = len(text) - start
            return found if first else [text[start + i % period] for i in range(most)]
    return []


@pytest.mark.parametrize("prefer", ["recent", "first"])
def test_the_index_finds_what_a_search_finds(prefer: Any) -> None:
    """Of the first place also what transformers finds."""
    dice, hits = random.Random(1), 0
    for _ in range(200):
        longest = dice.randint(1, 4)
        shortest, most, words = dice.randint(1, longest), dice.randint(1, 6), dice.randint(1, 6)
        index, text = NgramIndex(range(shortest, longest + 1), prefer), []
        for _ in range(dice.randint(1, 8)):
            more = [dice.randrange(words) for _ in range(dice.randint(0, 5))]
            text += more
            index.extend(more)
            expected = sought(text, shortest, longest, most, prefer == "first") if text else []
            assert index.find(most)[1] == expected
            hits += bool(expected)
        if prefer == "first" and shortest == 1 and len(text) > 1:
            theirs = PromptLookupCandidateGenerator(num_output_tokens=most, max_matching_ngram_size=longest, max_length=1000)
            ids, _ = theirs.get_candidates(torch.tensor([text]))
            assert expected == ids[0, len(text) :].tolist()
    assert hits > 300


def test_a_draft_ends_before_an_end_and_within_its_room(model: Any) -> None:
    asked = torch.tensor([5, 6, 7, 8, 9, 10, 5, 6])
    decoder = start(PromptLookup(), ModelRunner(model), [Request(asked, 30, frozenset({9}))])
    session: Any = decoder.session
    decoder.step()
    index = NgramIndex((1, 2, 3), "recent")
    index.extend(asked.tolist())
    session.drafter.index[0], session.alive[0] = index, True
    for room, drafted in ((28, [7, 8]), (2, [7, 8]), (1, [7]), (0, [])):  # 9 is an end
        assert session.drafter._row_draft(0, room).tokens == drafted


def test_the_release_of_prompt_lookup_by_hand(model: Any) -> None:
    """Trigrams before bigrams and single tokens, the first of several places, and ten tokens."""
    decoder = start(PromptLookup(preset="release"), ModelRunner(model), [Request(prompt(9), 30)])  # type: ignore[call-arg]
    session: Any = decoder.session
    decoder.step()
    first, second = list(range(20, 32)), list(range(40, 52))
    for text, drafted in (
        ([2, 3, 60, 1, 2, 3, *first, 8, 1, 2, 3, *second, 8, 1, 2, 3], first[:10]),
        ([2, 60, 2, 3, *first, 7, 2, 3, *second, 2, 3], first[:10]),
        ([7, 3, *first, 3, *second, 3], first[:10]),
        ([7, 4, *first, 4, *second, 3], []),
    ):
        session.drafter.index[0] = session.drafter._new_index()
        session.drafter.index[0].extend(text)
        assert session.drafter._row_draft(0, 28).tokens == drafted


def test_a_prediction_is_followed_as_long_as_the_text_agrees_and_found_again() -> None:
    expected = PredictedText([4, 5, 6, 8, 1, 2, 6, 8, 3])
    assert expected.next(3) == [4, 5, 6]
    for tokens, agreed, then in (
        ([4, 5], AT_FIRST + 2, [6, 8, 1, 2, 6, 8, 3]),
        ([9], 0, []),
        ([6], 0, []),  # one token is too little
        ([8], 2, [1, 2, 6, 8, 3]),  # the next such place, not the last one
        ([1, 2, 6, 8], 6, [3]),
        ([3], 7, []),  # there is no more of it
    ):
        expected.extend(tokens)
        assert (expected.run, expected.next(10)) == (agreed, then)
    expected.extend([4, 5])
    assert expected.next(2) == [6, 8], "it may go on from before"
    assert PredictedText().next(5) == []


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_prediction_that_is_right_is_accepted_and_a_wrong_one_changes_nothing(temperature: float) -> None:
    """Of a model that never repeats itself: nothing but the prediction can be looked up."""
    raw, asked, new = llama(head=1.0), prompt(12, 3), 60
    own = Sampling(temperature, seed=5)
    ((plain,), _, _) = decode(Autoregressive(), ModelRunner(raw), [Request(asked, new, sampling=own)])
    edited, other = [*plain[:20], 1, 2, *plain[22:]], prompt(60, 9).tolist()
    for prediction, least, most in ((plain, 20, 60), (edited, 15, 58), (other, 0, 6)):
        decoder = start(PromptLookup(), ModelRunner(raw), [Request(asked, new, sampling=own, prediction=prediction)])
        assert [token for step in run(decoder) for token in step.tokens[0]] == plain
        assert least <= decoder.session.drafter.accepted_predictions(0) <= most


def test_a_prediction_is_refused_where_nothing_is_looked_up() -> None:
    for method in (Autoregressive(), LayerSkip(2), Auto((LayerSkip(2),), use_profile=False)):
        with pytest.raises(ValueError, match="auto or prompt_lookup"):
            start(method, ModelRunner(llama()), [Request(prompt(5, 1), 10, prediction=[1, 2])])


def looping(model: Any, length: int = 40, seed: int = 0) -> torch.Tensor:
    """The end of a long text of a model."""
    wish = {"max_new_tokens": 120, "do_sample": False, "eos_token_id": None}
    said: Any = skipstone.generate(model, prompt(9, seed), Autoregressive(), **wish)
    return torch.tensor(said.new_tokens[0][-length:])


METHODS: list[Method] = [
    *(PromptLookup(), PromptLookup(prefer="first"), PromptLookup(2, 2, 4), Jacobi(), Jacobi(3)),
    *(Lookahead(), Lookahead(3, 2, 2), Lookahead(1, 3, 1), Recycle(), Recycle(5, 2)),
]
WISH: dict[str, Any] = {"max_new_tokens": 70, "eos_token_id": None}


@functools.cache
def repeating(family: str, forgets: bool) -> tuple[Any, Any, list[tuple[dict[str, Any], Any]]]:
    """A model, three rows of its own text, and their plain continuations: greedy, and sampled at two temperatures, the higher
    of which leaves the repetition."""
    model = forgetful(families.cached(family)) if forgets else families.cached(family)
    asked = families.padded([looping(model, length, seed) for seed, length in ((1, 40), (2, 31), (3, 22))])
    sampled: dict[str, Any] = {"do_sample": True, "seed": [3, 4, 5]}
    ways = [{"do_sample": False}, {**sampled, "temperature": 0.5}, {**sampled, "temperature": 1.0}]
    return model, asked, [(way, skipstone.generate(model, asked, Autoregressive(), **WISH, **way).new_tokens) for way in ways]


CELLS = list(itertools.product(METHODS, families.NAMES))


@pytest.mark.parametrize(("method", "family"), slow_except([(METHODS[3], "llama")], CELLS, full=CELLS[::11]), ids=str)
def test_where_texts_repeat_themselves_drafts_are_accepted(method: Method, family: str) -> None:
    """Jacobi needs a model that looks back: it cannot guess a token that follows from the last one alone."""
    model, asked, said = repeating(family, not isinstance(method, Jacobi))
    accepted = drafted = 0
    for way, plain in said:
        out: Any = skipstone.generate(model, asked, method, **WISH, **way)
        assert out.new_tokens == plain
        accepted, drafted = accepted + out.stats.accepted, drafted + out.stats.drafted
    assert accepted >= 5
    assert drafted - accepted >= 20


def argmax(model: Any, text: list[int]) -> list[int]:
    """transformers' likeliest token after every prefix of a text."""
    return model(torch.tensor([text])).logits[0].argmax(-1).tolist()


def test_jacobi_refines_the_blocks_that_the_paper_says() -> None:
    """The algorithm by hand: compute all places of the guessed block, keep what agrees, guess the computed tokens behind it."""
    model = llama()
    block, asked, new = 5, looping(model), 90
    decoder = start(Jacobi(block), ModelRunner(model), [Request(asked, new)])
    session: Any = decoder.session
    text = asked.tolist() + decoder.step().tokens[0]
    first = session.drafter.first_guesses[0]
    guesses, accepted = list(first), 0
    assert set(guesses) <= set(asked.tolist())
    while decoder.busy:
        room = min(block, new - (len(text) - len(asked)) - 1)
        said = argmax(model, text + guesses[:room])[len(text) - 1 :]
        kept = next((at for at in range(room) if guesses[at] != said[at]), room)
        assert session.drafter.guesses[0].tolist() == guesses
        step = decoder.step()
        assert (step.tokens[0], step.drafted[0]) == (said[: kept + 1], room)
        text += said[: kept + 1]
        behind = said[kept + 1 :]
        guesses = [*behind, *first[len(behind) :]] if len(behind) < block else behind[:block]
        accepted += kept
    assert accepted > 1


def test_jacobis_block_moves_with_a_text_that_goes_on_without_drafts() -> None:
    """Rows 0 and 1 decode while a prompt runs. Row 2 gets its first token, for which its first guesses were made."""
    model, block = llama(), 5
    requests = [Request(prompt(n, n), 30) for n in (9, 12, 8)]
    decoder = start(Jacobi(block), ModelRunner(model), requests)
    decoder.step()
    drafter: Any = decoder.session.drafter
    before = drafter.guesses.tolist()
    verdicts = [RowVerdict([], [5], "bonus", 0, 0), RowVerdict([], [5, 6], "bonus", 0, 0), RowVerdict([], [7], "prefill", 0, 0)]
    drafter.observe_commits(None, verdicts)
    assert drafter.guesses.tolist() == [[*before[0][1:], before[0][0]], [*before[1][2:], *before[1][:2]], before[2]]


def branch(nodes: Any, node: int) -> list[int]:
    """Tokens from the root down to a node."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, nodes.tokens[node])
        node = nodes.parents[node]
    return path


@pytest.mark.parametrize("family", slow_except([None], [None, "mistral"]), ids=["llama", "sliding window"])
def test_one_mask_serves_both_branches(family: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of a window's last row are transformers' after the text and that column's own path. The n-grams that the
    window gives away are its columns, and it drops its oldest row. N-grams are merged into a trie. Two rows of different
    lengths."""
    model: Any = llama() if family is None else families.cached(family)
    requests = [Request(prompt(20, 3, vocab=50), 24), Request(prompt(6, 4, vocab=50), 24)]
    decoder = start(Lookahead(4, 4, 3), ModelRunner(model), requests)
    session: Any = decoder.session
    trees: dict[int, Any] = {}
    real = session.drafter._row_draft
    monkeypatch.setattr(session.drafter, "_row_draft", lambda row, allowed: trees.setdefault(row, real(row, allowed)))
    texts, checked, tried = [request.prompt.tolist() for request in requests], 0, 0
    while decoder.busy:
        trees.clear()
        before = [[list(level) for level in window.levels] for window in session.drafter.windows]
        prefilling = session.prefilling
        step = decoder.step()
        for row, nodes in trees.items():
            if prefilling or row in step.finished or session.drafter.windows[row].bottom is None:
                continue
            first = session.drafter.windows[row].bottom
            said = [argmax(model, texts[row] + branch(nodes, first + column))[-1] for column in range(4)]
            levels = [*before[row], said]
            assert session.drafter.windows[row].levels == (levels[1:] if len(levels) == 4 else levels)
            if len(levels) == 4:
                columns = list(zip(*levels, strict=True))
                alike = [column[1:] for column in columns if column[0] == columns[0][0]]
                latest = list(dict.fromkeys(reversed(alike)))[:3]  # a pool keeps three n-grams a token
                assert {*latest} <= {*session.drafter.pools[row].after(columns[0][0])}
            children = [(nodes.parents[at], nodes.tokens[at]) for at in range(len(nodes.tokens)) if nodes.candidate[at]]
            assert len(children) == len(set(children))
            tried, checked = tried + len(children), checked + 1
        for row, tokens in enumerate(step.tokens):
            texts[row] += tokens
    assert checked > 20
    assert tried > 0


def test_the_release_of_lookahead_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """W = 7, N = 5: the window grows to four rows of seven guesses. G = 7: of nine n-grams after a token the latest seven are
    tried, each with four further tokens."""
    asked = [token for one in range(1, 10) for token in (5, *range(10 * one, 10 * one + 4))]
    decoder = start(Lookahead(preset="release"), ModelRunner(llama()), [Request(torch.tensor(asked), 20)])  # type: ignore[call-arg]
    session: Any = decoder.session
    decoder.step()
    real, windows, text = session.drafter._row_draft, list[int](), session.drafter.text[0]
    text.append(5)
    tried = real(0, 10)
    text.pop()
    paths = [branch(tried, node) for node in range(len(tried.tokens)) if tried.candidate[node]]
    assert [path for path in paths if len(path) == 4] == [list(range(10 * one, 10 * one + 4)) for one in range(9, 2, -1)]

    def row_draft(row: int, allowed: int) -> Any:
        draft = real(row, allowed)
        windows.append(draft.candidate.count(False))
        return draft

    monkeypatch.setattr(session.drafter, "_row_draft", row_draft)
    for _ in range(6):
        decoder.step()
    assert windows == [7, 14, 21, 28, 28, 28]


def test_the_prompts_n_grams_are_tried_at_once(model: Any) -> None:
    _, stats, steps = decode(Lookahead(2, 4, 4), ModelRunner(model), [Request(looping(model), 12)])
    assert steps[1].drafted[0] > 0
    assert stats.verified_nodes > stats.drafted > stats.accepted > 0


AT_THE_END = [Lookahead(), Lookahead(1, 3, 1), Lookahead(3, 9, 2), Jacobi(), PromptLookup()]


@pytest.mark.parametrize("method", slow_except((Lookahead(3, 9, 2),), AT_THE_END), ids=str)
@pytest.mark.parametrize("readable", [pytest.param(True, marks=pytest.mark.product), False])
def test_up_to_the_last_position(method: Method, readable: bool, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window reaches beyond the last position; also if tensors cannot be read on the host."""
    if not readable:
        monkeypatch.setattr(host_transfer, "is_on_host", lambda tensor: False)
    asked = looping(model, 40).repeat(13)[:500]
    for rows in ([asked], [asked, asked[30:]]):
        assert_as_plain(model, families.padded(rows), method, max_new_tokens=12, do_sample=False)


def test_a_tree_is_filled_by_what_was_kept_and_kept_is_what_the_model_says() -> None:
    """Step by step against transformers' own logits: the drafted tree, what is accepted of it, and the kept continuations."""
    model = forgetful(llama())

    def likeliest(text: list[int]) -> list[int]:
        return model(torch.tensor([text])).logits[0, -1].topk(3).indices.tolist()

    asked, new = looping(model), 30
    decoder = start(Recycle(6, 3), ModelRunner(model), [Request(asked, new)])
    session: Any = decoder.session
    text = asked.tolist()
    kept = {text[-1]: likeliest(text)}  # the prompt's last token was scored, too
    text += decoder.step().tokens[0]
    accepted = 0
    while decoder.busy:
        room, root = new - (len(text) - len(asked)) - 1, text[-1]
        tokens, paths = [], []  # of the tree that is to be drafted
        placed: dict[int, int] = {-1: -1}
        for node, (parent, rank) in enumerate(shape(6, 3)):
            if parent not in placed:
                continue
            path = paths[placed[parent]] if placed[parent] >= 0 else []
            said = kept.get(path[-1] if path else root, [])
            if rank < len(said) and len(path) < room:
                placed[node] = len(tokens)
                tokens.append(said[rank])
                paths.append([*path, said[rank]])
        step = decoder.step()
        assert session.drafter._drafts[0].tokens == tokens
        assert step.verified_nodes == len(tokens)
        scored = [[], *paths]
        rows = [likeliest(text + path) for path in scored]
        accepted_path = step.tokens[0][: step.accepted[0]]
        order = [*range(len(scored)), 0, *(scored.index(accepted_path[: n + 1]) for n in range(len(accepted_path)))]
        for place in order:
            kept[scored[place][-1] if scored[place] else root] = rows[place]
        assert session.drafter.kept.continuations == kept
        text += step.tokens[0]
        accepted += step.accepted[0]
    assert accepted > 5


def test_kept_continuations_outlive_a_request(model: Any) -> None:
    wish = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
    first, second = (assert_as_plain(model, looping(model), Recycle(), **wish).stats for _ in range(2))
    assert second.accepted > first.accepted
