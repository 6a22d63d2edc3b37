"""The proofs can fail: each of these bugs, planted into the running code, is found by the proof that is there for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import TemperatureLogitsWarper

from skipstone import LayerSkip
from skipstone.decoding import noise, sampling, verify
from skipstone.decoding.draft import Draft, RowVerdict, Verdict
from skipstone.decoding.noise import DRAFT
from skipstone.decoding.sampling import Sampler, Scores, Warping
from skipstone.decoding.session import Session
from skipstone.decoding.stopping import RunningRequest
from skipstone.methods.layerskip import LayerSkipSession
from skipstone.methods.shared.confidence import Confidence
from skipstone.models import frontier
from skipstone.models.kvstore import KVStore
from skipstone.models.layered import LayeredModel
from skipstone.models.passes import Pass
from tests.decoding import test_decode as test_decode
from tests.decoding import test_law as test_law
from tests.decoding import test_noise as test_noise
from tests.decoding import test_sampling as test_sampling
from tests.decoding import test_trees as test_trees
from tests.decoding import test_verify as test_verify
from tests.decoding import test_walk as test_walk
from tests.helpers.enumeration import VOCAB, Pushing, proves
from tests.helpers.machine import llama, mistral
from tests.helpers.trees import Trees
from tests.models import test_frontier as test_frontier
from tests.models import test_kvstore as test_kvstore
from tests.models import test_masks as test_masks

Patch = pytest.MonkeyPatch
Case = tuple[Callable[[Patch], None], Callable[[], object]]
SKIP = LayerSkip(exit_layer=1, num_speculative_tokens=2)
ROWS = (4, 17, 9)


def law(method: Any = SKIP, new: int = 3, **settings: Any) -> None:
    """The enumeration, on three tokens: one draft accepted or rejected, and what follows."""
    proves(llama(vocab=VOCAB, hidden=8, layers=2, head=2.0, seed=2).double(), method, new=new, **settings)


def trees(**settings: Any) -> None:
    test_trees.proves(llama, test_trees.requests(ROWS, temperature=1.0), Trees(nodes=10, **settings), check=True)


def store(method: Any, temperature: float = 0.0) -> None:
    test_kvstore.test_the_store_holds_what_a_fresh_forward_gives_after_every_commit(method, ROWS, temperature)


def recovered_from_p(patch: Patch) -> None:
    patch.setattr(verify, "residual", lambda p, q: p)


def bonus_from_raw_logits(patch: Patch) -> None:
    own = Scores.p

    def p(self: Scores, node: Tensor, path: Tensor, walking: Tensor) -> Tensor:
        last = node == self.logits.shape[1] - 2
        return torch.where(last[:, None], self.at(node).softmax(-1), own(self, node, path, walking))

    patch.setattr(Scores, "p", p)


def drawn_token_dropped(patch: Patch) -> None:
    own = LayerSkipSession.draft

    def draft(self: LayerSkipSession, limit: list[int]) -> Draft:
        found = own(self, limit)
        if found.q is not None:
            found.valid = found.valid & (found.q.gather(2, found.tokens[:, :, None]).squeeze(2) > 0.5)
        return found

    patch.setattr(LayerSkipSession, "draft", draft)


def q_before_warpers(patch: Patch) -> None:
    own = Sampler.propose

    def propose(self: Sampler, *arguments: Any) -> Any:
        token, _, scores = own(self, *arguments)
        return token, scores.softmax(-1), scores

    patch.setattr(Sampler, "propose", propose)


def processors_blind_to_the_draft(patch: Patch) -> None:
    own = Sampler.process
    patch.setattr(Sampler, "process", lambda self, logits, path, wanted=None: own(self, logits, path[:, :0], wanted))


def noise_used_twice(patch: Patch) -> None:
    for module in (sampling, verify):
        patch.setattr(module, "substream", lambda stream, offset: stream)


def given_tokens_taken_as_drawn(patch: Patch) -> None:
    patch.setattr(verify, "one_hot_where", lambda draft: draft.q)


def noise_knows_the_batch(patch: Patch) -> None:
    own = noise._mix
    patch.setattr(noise, "_mix", lambda x: own(x + x.shape[0]))


def noise_forgets_the_position(patch: Patch) -> None:
    patch.setattr(noise, "_POSITION", 0)


def coupled_draft_on_its_own_noise(patch: Patch) -> None:
    patch.setattr(sampling, "TARGET", DRAFT)


def one_draft_too_many(patch: Patch) -> None:
    own = verify.match_greedy

    def greedy(draft: Draft, picks: Tensor, waived: Tensor | None = None) -> Verdict:
        verdict = own(draft, picks, waived)
        verdict.accepted = (verdict.accepted + 1).clamp(max=draft.width)
        return verdict

    patch.setattr(verify, "match_greedy", greedy)


def barred_nodes_accepted(patch: Patch) -> None:
    patch.setattr(Draft, "offered", property(lambda self: self.valid))


def accepted_path_not_moved(patch: Patch) -> None:
    patch.setattr(KVStore, "move", lambda self, row, source, target: None)


def rejected_drafts_kept(patch: Patch) -> None:
    own = Session.commit

    def commit(self: Session, draft: Draft | None, verdicts: list[RowVerdict]) -> None:
        before = list(self.store.length)
        own(self, draft, verdicts)
        for row, verdict in enumerate(verdicts):
            if draft is not None and verdict.tokens:
                self.store.length[row] = before[row] + verdict.drafted + 1

    patch.setattr(Session, "commit", commit)


def siblings_see_one_another(patch: Patch) -> None:
    def earlier(parents: Tensor) -> Tensor:
        rows, width = parents.shape
        return torch.ones(rows, width + 1, width + 1).tril().bool()

    patch.setattr(frontier, "ancestors", earlier)


def window_one_too_wide(patch: Patch) -> None:
    own = Pass._visible
    patch.setattr(Pass, "_visible", lambda self, window: own(self, None if window is None else window + 1))


def trash_in_slot_zero(patch: Patch) -> None:
    patch.setattr(KVStore, "trash", property(lambda self: 0))


def only_the_last_token_can_end(patch: Patch) -> None:
    def take(self: RunningRequest, verdict: RowVerdict) -> None:
        self.tokens += verdict.tokens
        verdict.finished = len(self.tokens) >= self.request.max_new_tokens or self.tokens[-1] in self.request.eos

    patch.setattr(RunningRequest, "take", take)


def threshold_left_by_the_last_request(patch: Patch) -> None:
    patch.setattr(Confidence, "STEP", 4.0)
    patch.setattr(Confidence, "reset", lambda self, row: None)


def top_p_rounded_twice(patch: Patch) -> None:
    own = Warping.__init__

    def init(self: Warping, rows: Any, device: Any) -> None:
        own(self, rows, device)
        self.tail = 1 - torch.tensor([row.top_p for row in rows])

    patch.setattr(Warping, "__init__", init)


def draft_not_run_again(patch: Patch) -> None:
    """The scoring pass takes exit states for granted although the tokens are to start over."""
    patch.setattr(frontier.Frontier, "restart", lambda self: None)


def waiting_tokens_left_behind(patch: Patch) -> None:
    """A token that waits deeper down is declared done without running the layers between."""
    own = frontier.Frontier.advance

    def advance(self: frontier.Frontier, to: int) -> None:
        waiting = (self.depth > 0) & (self.depth < to)
        self.depth[waiting] = to
        own(self, to)

    patch.setattr(frontier.Frontier, "advance", advance)


COOL = {"warpers": [TemperatureLogitsWarper(0.5)], "temperature": 0.5}
CASES: list[Case] = [
    (recovered_from_p, law),
    (recovered_from_p, test_verify.test_accepted_and_residual_mass_add_up_to_p),
    (recovered_from_p, test_law.test_layerskip_standard_passes_a_chi_square),
    (bonus_from_raw_logits, lambda: law(**COOL)),
    (drawn_token_dropped, law),
    (q_before_warpers, lambda: law(**COOL)),
    (processors_blind_to_the_draft, lambda: law(processors=[Pushing()])),
    (processors_blind_to_the_draft, lambda: law(Trees(nodes=5, branching=0.7, seed=5), 4, processors=[Pushing()])),
    (noise_used_twice, lambda: law(new=4)),
    (given_tokens_taken_as_drawn, test_verify.test_leviathan_takes_nodes_that_were_not_drawn_as_one_hot),
    (noise_knows_the_batch, test_noise.test_a_row_does_not_depend_on_its_neighbours_or_on_how_many_numbers_are_asked_for),
    (noise_forgets_the_position, lambda: test_noise.test_numbers_are_uniform_along_every_axis("positions")),
    (coupled_draft_on_its_own_noise, lambda: test_law.test_coupled_acceptance_of_the_loop_is_what_theory_says(layered())),
    (one_draft_too_many, lambda: test_walk.test_match_greedy_equals_match_at_temperature_zero(chain=True, barred=False)),
    (one_draft_too_many, lambda: store(test_kvstore.METHODS[2])),
    (barred_nodes_accepted, lambda: test_walk.test_match_equals_a_plain_python_walk(chain=False)),
    (barred_nodes_accepted, test_trees.test_nodes_that_may_not_be_accepted_change_nothing),
    (accepted_path_not_moved, trees),
    (rejected_drafts_kept, lambda: store(test_kvstore.METHODS[2])),
    (siblings_see_one_another, lambda: test_masks.test_a_scoring_pass_sees_what_the_definition_says("tree", None)),
    (siblings_see_one_another, lambda: test_frontier.test_a_tree_finishes_like_a_forward_over_each_of_its_paths(llama)),
    (siblings_see_one_another, trees),
    (window_one_too_wide, lambda: test_masks.test_a_scoring_pass_sees_what_the_definition_says("chain", 3)),
    (window_one_too_wide, lambda: test_frontier.test_a_tree_finishes_like_a_forward_over_each_of_its_paths(sliding)),
    (trash_in_slot_zero, trees),
    (only_the_last_token_can_end, lambda: test_trees.test_an_end_token_inside_a_tree_ends_the_row_there({})),
    (
        threshold_left_by_the_last_request,
        lambda: test_decode.test_a_request_on_a_busy_server_gets_the_text_it_gets_alone(test_decode.METHODS[2], llama),
    ),
    (top_p_rounded_twice, lambda: test_sampling.test_top_p_cuts_ties_where_transformers_does(0.8)),
    (draft_not_run_again, test_frontier.test_every_token_goes_through_every_layer_once_and_restart_repeats_all),
    (
        waiting_tokens_left_behind,
        lambda: test_frontier.test_tokens_waiting_at_mixed_depths_finish_like_a_full_forward(llama, apart=True),
    ),
]


def layered() -> LayeredModel:
    return LayeredModel(llama())


def sliding() -> Any:
    return mistral(window=6)


@pytest.mark.parametrize(("plant", "proof"), CASES, ids=[f"{index} {plant.__name__}" for index, (plant, _) in enumerate(CASES)])
def test_a_planted_bug_is_found(plant: Callable[[Patch], None], proof: Callable[[], object], monkeypatch: Patch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        proof()


@pytest.mark.slow
@pytest.mark.parametrize("proof", [proof for _, proof in CASES], ids=range(len(CASES)))
def test_without_the_bug_the_proof_passes(proof: Callable[[], object]) -> None:
    proof()
