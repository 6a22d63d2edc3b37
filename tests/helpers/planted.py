"""The proofs can fail: each of these bugs, planted into the running code, is found by the proof that is there for it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from skipstone.decoding import noise, sampling, verify
from skipstone.decoding.draft import Draft, GreedyVerdict, RowVerdict
from skipstone.decoding.noise import DRAFT
from skipstone.decoding.sampling import Sampler, Scores, WarperSettings
from skipstone.decoding.session import Session
from skipstone.decoding.stopping import RunningRequest
from skipstone.engines import partial_forward as forward
from skipstone.engines.engine import SurvivalThresholds
from skipstone.engines.kv_cache import KVCache
from skipstone.methods.drafting.chain_stop_rule import ConfidenceRule
from skipstone.methods.layerskip import LayerSkipDrafter
from skipstone.models.passes import Pass

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]
Proof = Callable[[], object]


def found_by(*cases: tuple[Plant, Proof], every: int = 1) -> pytest.MarkDecorator:
    """One test for each bug and the proof that finds it; the test is `assert_found(plant, proof, monkeypatch)`.

    every: where proofs take long, all but every so many-th test are slow.
    """
    rows = [
        pytest.param(plant, proof, id=f"{index} {plant.__name__}", marks=[pytest.mark.slow] if index % every else [])
        for index, (plant, proof) in enumerate(cases)
    ]
    return pytest.mark.parametrize(("plant", "proof"), rows)


def assert_found(plant: Plant, proof: Proof, monkeypatch: Patch) -> None:
    """The proof fails with the bug in place."""
    plant(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        proof()


def recovered_from_p(patch: Patch) -> None:
    patch.setattr(verify, "residual", lambda p, q: p)


def siblings_not_renormalised(patch: Patch) -> None:
    patch.setattr(verify, "without", lambda q, x: q.scatter(1, x, 0.0))


def siblings_drawn_with_replacement(patch: Patch) -> None:
    patch.setattr(verify, "without", lambda q, x: q)


def bonus_from_raw_logits(patch: Patch) -> None:
    own = Scores.p

    def p(self: Scores, node: Tensor, path: Tensor, walking: Tensor) -> Tensor:
        last = node == self.logits.shape[1] - 2
        return torch.where(last[:, None], self.at(node).softmax(-1), own(self, node, path, walking))

    patch.setattr(Scores, "p", p)
    patch.setattr(Scores, "chances", p)


def drawn_token_dropped(patch: Patch) -> None:
    own = LayerSkipDrafter.propose_draft

    def propose_draft(self: LayerSkipDrafter, limits: list[int], stop_rule: SurvivalThresholds | None = None) -> Draft:
        found = own(self, limits, stop_rule)
        if found.q is not None:
            found.valid = found.valid & (found.q.gather(2, found.tokens[:, :, None]).squeeze(2) > 0.5)
        return found

    patch.setattr(LayerSkipDrafter, "propose_draft", propose_draft)


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
    own = GreedyVerdict.tolist

    def tolist(self: GreedyVerdict, draft: Draft) -> list[RowVerdict]:
        verdicts = own(self, draft)
        for row, verdict in enumerate(verdicts):
            if draft.parents is None and len(verdict.path) < draft.width:
                verdict.path.append(len(verdict.path))
                verdict.tokens.append(int(self.picks[row, len(verdict.path)]))
        return verdicts

    patch.setattr(GreedyVerdict, "tolist", tolist)


def barred_nodes_accepted(patch: Patch) -> None:
    patch.setattr(Draft, "offered", property(lambda self: self.valid))


def accepted_path_not_moved(patch: Patch) -> None:
    patch.setattr(KVCache, "move", lambda self, row, source, target: None)


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

    patch.setattr(forward, "ancestors", earlier)


def window_one_too_wide(patch: Patch) -> None:
    own = Pass._visible
    patch.setattr(Pass, "_visible", lambda self, reach: own(self, reach._replace(window=reach.window and reach.window + 1)))


def trash_in_slot_zero(patch: Patch) -> None:
    patch.setattr(KVCache, "trash", property(lambda self: 0))


def only_the_last_token_can_end(patch: Patch) -> None:
    def take(self: RunningRequest, verdict: RowVerdict) -> None:
        self.tokens += verdict.tokens
        verdict.finished = len(self.tokens) >= self.request.max_new_tokens or self.tokens[-1] in self.request.eos

    patch.setattr(RunningRequest, "take", take)


def threshold_left_by_the_last_request(patch: Patch) -> None:
    patch.setattr(ConfidenceRule, "STEP", 4.0)
    patch.setattr(ConfidenceRule, "reset", lambda self, row: None)


def top_p_rounded_twice(patch: Patch) -> None:
    own = WarperSettings.__init__

    def init(self: WarperSettings, rows: Any, device: Any) -> None:
        own(self, rows, device)
        self.tail = 1 - torch.tensor([row.top_p for row in rows])

    patch.setattr(WarperSettings, "__init__", init)


def draft_not_run_again(patch: Patch) -> None:
    """The scoring pass takes exit states for granted although the tokens are to start over."""
    patch.setattr(forward.PartialForward, "restart", lambda self: None)


def waiting_tokens_left_behind(patch: Patch) -> None:
    """A token that waits deeper down is declared done without running the layers between."""
    own = forward.PartialForward.advance

    def advance(self: forward.PartialForward, to: int) -> None:
        waiting = (self.depth > 0) & (self.depth < to)
        self.depth[waiting] = to
        own(self, to)

    patch.setattr(forward.PartialForward, "advance", advance)
