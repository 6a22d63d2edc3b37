"""AdaDecode: Accelerating LLM Decoding with Adaptive Layer Parallelism
(Wei et al., ICML 2025, arXiv 2506.03700), section 2 and Algorithm 1.

A token goes up the layers stage by stage. Where the light head of a candidate layer is sure of the next token, that token
starts at once, and the earlier token waits at that layer. A later token that comes by takes the waiting ones along. When the
newest token reaches the top, all tokens have, and all early predictions are verified at once.

Deviations: the threshold is asked of the head's most probable token before anything is drawn (Eq. 1, read literally, asks it of
the drawn token, which biases sampling); a depth's list is emptied when it is run (Algorithm 1 as printed never does); with
`num_speculative_tokens` early predictions the newest token goes to the top untested; a deeper head may stop further predictions
(`recheck`, ours, off).
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from skipstone.decoding.draft import Draft, RowVerdict
from skipstone.decoding.drafter import Candidate, Drafter, layers_used
from skipstone.decoding.sampling import Sampler
from skipstone.decoding.settings import RejectionRule, layer_numbers, setting
from skipstone.engines.engine import SurvivalThresholds
from skipstone.engines.host_transfer import on_device
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.partial_forward import PartialForward
from skipstone.methods.adadecode.auto_candidate import HeadChainDrafter
from skipstone.methods.adadecode.exit_counts import AdaDecodeCounts
from skipstone.methods.adadecode.heads import ORIGINAL, ExitHeads, bundled_name_for, heads_fitting, load_heads, original_heads
from skipstone.methods.drafting import method_states
from skipstone.methods.drafting.candidates import of_layers
from skipstone.methods.drafting.chain import DraftChain
from skipstone.methods.drafting.shortlist import ShortlistMethod, vocabulary_setting
from skipstone.policy.draft_length import MAX_DRAFTS


@dataclass(frozen=True)
class AdaDecode(ShortlistMethod):
    """AdaDecode: light heads at middle layers predict early."""

    name: ClassVar[str] = "adadecode"
    positional: ClassVar[str] = "lets tokens wait at different layers"
    aliases: ClassVar[dict[str, str]] = {
        "threshold": "confidence_threshold",
        "max_pending": "num_speculative_tokens",
        "num_assistant_tokens": "num_speculative_tokens",
    }
    if_few_accepted: ClassVar[str] = "An acceptance rate that low says that the heads are not trained for this model or text."

    heads: str | ExitHeads | None = setting(
        None, "a folder, a hub id or a bundled name of heads, or 'original': the model's own head; none: bundled heads"
    )
    confidence_threshold: float = setting(
        0.75, "gamma, predict early where the most probable token has more than this.", within=(0, 1)
    )
    num_speculative_tokens: int = setting(5, "early predictions a step.")
    exit_layers: tuple[int, ...] = setting((), "candidates among the heads' layers; empty for all.")
    verification: bool = setting(True, "False keeps every early prediction (Table 3; lossy).")
    recheck: bool = setting(
        False, "deeper heads look again at pending predictions; one that is sure of another token ends predicting."
    )
    rejection_sample_method: RejectionRule = setting(
        "standard",
        '"standard" is Eq. 2, "coupled" draws drafts from the target\'s own noise: same seed, same text as plain sampling.',
    )
    draft_vocabulary: int | str | None = vocabulary_setting()

    def __post_init__(self) -> None:
        object.__setattr__(self, "exit_layers", layer_numbers("exit_layers", self.exit_layers))

    @property
    def lossless(self) -> bool:
        return self.verification

    def check(self, model: ModelRunner) -> None:
        super().check(model)
        self.heads_for(model)
        self.shortlist(model)

    def heads_for(self, model: ModelRunner) -> ExitHeads:
        """The heads of a model. ValueError where they are another's, OSError where there are none."""
        if self.heads == ORIGINAL:
            return original_heads(model, self.exit_layers)
        if isinstance(self.heads, ExitHeads):
            heads = heads_fitting(self.heads, model)
        elif (source := bundled_name_for(model) if self.heads is None else self.heads) is None:
            raise ValueError(
                "no exit heads for this model: `skipstone train heads MODEL` makes some, to be given as heads=FOLDER "
                '(heads="original" predicts with the model\'s own head)'
            )
        else:
            heads = load_heads(source, model)
        if wrong := [layer for layer in self.exit_layers if layer not in heads.card.layers]:
            raise ValueError(f"exit_layers must be among the heads' layers, {list(heads.card.layers)}, found {wrong}")
        return heads

    def shortlist(self, drafter: ModelRunner) -> Tensor | None:
        """As in `ShortlistMethod`; where no vocabulary is asked for, that of the heads."""
        return self.heads_for(drafter).shortlist if self.draft_vocabulary is None else super().shortlist(drafter)

    def report(self, model: PreTrainedModel) -> dict[str, Any]:
        return method_states.method_report(self, None, model)

    @property
    def accepts_all_drafts(self) -> bool:
        return not self.verification

    def create_drafter(self, model: ModelRunner, rows: int, capacity: int) -> Drafter:
        return AdaDecodeDrafter(self, model, rows)

    def auto_candidates(self, model: ModelRunner, rows: int, capacity: int) -> dict[str, Candidate]:
        """Each head drafts chains whose length `auto` decides."""
        heads, shortlist, found = self.heads_for(model), self.shortlist(model), dict[str, Candidate]()
        for number, layer in enumerate(heads.card.layers):
            if not self.exit_layers or layer in self.exit_layers:
                drafter = HeadChainDrafter(heads, number, model, rows, MAX_DRAFTS, shortlist)
                found[f"adadecode, head {layer}"] = of_layers(drafter, self, model, layer)
        return found


@dataclass
class LayerSweep:
    """The way of every row's newest token up the candidate layers, and the tokens that heads predicted on it.

    layers: of every row, the layer at which its next token was predicted, 0 where it was not. token: [B] int64, q: [B, V] or
    None, confidence: [B] float; they mean nothing for rows without a prediction. doubted: rows in which a deeper head is sure
    that an earlier prediction is wrong (`recheck`); they predict no further.
    """

    layers: list[int]
    token: Tensor
    q: Tensor | None = None
    confidence: Tensor | None = None
    doubted: list[bool] = field(default_factory=list)

    def take(self, layer: int, predicts: list[bool], token: Tensor, q: Tensor | None, confidence: Tensor, rows: Tensor) -> None:
        """Take over the predictions of a layer's head for some rows: `predicts` on the host, `rows` [B] bool on the device."""
        self.layers = [layer if here else before for here, before in zip(predicts, self.layers, strict=True)]
        self.token = torch.where(rows, token, self.token)
        self.confidence = confidence if self.confidence is None else torch.where(rows, confidence, self.confidence)
        if q is not None:
            self.q = q if self.q is None else torch.where(rows[:, None], q, self.q)


class AdaDecodeDrafter(Drafter):
    """Drafts at mixed depths; the scoring pass brings everything to the top. Every row predicts on its own, and waits until all
    rows are through a sweep. A row drafts no further once no head is sure of what follows its newest token."""

    def __init__(self, method: AdaDecode, model: ModelRunner, rows: int) -> None:
        self.model, self.method, self.shortlist = model, method, method.shortlist(model)
        self.coupled = method.rejection_sample_method == "coupled"
        self.heads = heads = method.heads_for(model)
        self.own_threads = heads.card.kind != "full"  # torch computes the product of a full head
        wanted = method.exit_layers or heads.card.layers
        self.exits = [(index, layer) for index, layer in enumerate(heads.card.layers) if layer in wanted]  # (head, its layer)
        layers = [layer for _, layer in self.exits]
        self.tallies = method_states.method_state(method, model, rows, heads, lambda: AdaDecodeCounts(layers))
        # of this step
        self._predicted_at: list[list[int]] = [[] for _ in range(rows)]  # of every row, the layers of its predictions
        self._passes: list[tuple[int, int, int]] = []  # (from layer, to layer, tokens)

    @property
    def sampler(self) -> Sampler:
        return self.view.sampler

    def describe(self, name: str) -> list[dict[str, Any]]:
        return [layers_used(name, exits=[layer for _, layer in self.exits])]

    def needs_logits(self, draft: Draft) -> bool:
        return not self.method.verification

    @property
    def _picks_at_exits(self) -> bool:
        """Whether the engine itself says what an exit's head picks, and how likely that is."""
        model = self.model
        return self.sampler.picks_only and self.heads.linear and model.engine.supports_chains and model.uses_engine_argmax

    def propose_draft(self, limits: list[int], stop_rule: SurvivalThresholds | None = None) -> Draft:
        """Algorithm 1 up to the verification: sweep after sweep, each for one further token."""
        chain = DraftChain(
            [min(self.method.num_speculative_tokens, allowed) for allowed in limits], self.view.alive, self.model.device
        )
        forward = self.view.start_forward(chain.max_drafts, self.shortlist)
        self._predicted_at, self._passes = [[] for _ in range(self.view.rows)], forward.passes
        position = forward.positions[:, 0] + 1  # [B]
        open_rows = chain.open_rows()
        layers, exits_left = self._draft_at_once(chain, forward)
        for place in range(len(layers), chain.width):
            sweep = self._sweep(forward, position + place, open_rows, self.exits if exits_left is None else exits_left)
            exits_left = None
            if not any(sweep.layers):
                break
            layers.append(sweep.layers)
            open_rows = self._add(chain, forward, sweep)
            if not any(open_rows):
                break
        draft = chain.draft(forward)
        if layers:
            draft.exit_layer = on_device(layers, self.model.device).t()  # [B, n]
        return draft

    def _draft_at_once(
        self, chain: DraftChain, forward: PartialForward
    ) -> tuple[list[list[int]], list[tuple[int, int]] | None]:
        """What the first exit's head is sure of in one engine call, token after token, where one row is greedy.

        Returns (the layer of every place, as in Sweep; the exits that are left for the newest token, None for all).
        """
        if self.view.rows > 1 or self.method.recheck or not self._picks_at_exits:
            return [], None
        index, layer = self.exits[0]
        transform = self.heads.transform(index)
        found = forward.draft_greedily(
            layer, None, chain.max_drafts, [self.method.confidence_threshold], self.sampler.eos, transform, True
        )
        if found is None:
            return [], None
        assert found.confidence is not None, "thresholds were given"
        count = found.counts[0]
        for token, confidence in zip(found.tokens.unbind(1), found.confidence.unbind(1), strict=True):
            chain.add(token, None, confidence)
        ended = count == chain.width or (count and int(found.tokens[0, -1]) in self.sampler.eos[0])
        for sure in [True] * count + [False] * (not ended):
            self.tallies.tested(layer, [sure], stopped=False)
        self._predicted_at[0] += [layer] * count
        return [[layer]] * count, [] if ended else self.exits[1:]

    def _add(self, chain: DraftChain, forward: PartialForward, sweep: LayerSweep) -> list[bool]:
        """Add the predictions of a sweep to the draft. Returns which rows may predict another token."""
        chain.stop(on_device([layer > 0 for layer in sweep.layers], self.model.device, torch.bool))
        chain.add(sweep.token, sweep.q, sweep.confidence)
        forward.append(*chain.newest)
        for row, layer in enumerate(sweep.layers):
            if layer:
                self._predicted_at[row].append(layer)
            else:
                forward.depth[row, -1] = forward.top  # there is no token in this column, so no layer is run
        unfinished = self.sampler.unfinished(sweep.token)
        goes_on = [True] * self.view.rows if unfinished is None else unfinished.tolist()
        return [
            layer > 0 and unended and not doubted and len(chain) < max_drafts
            for layer, unended, doubted, max_drafts in zip(sweep.layers, goes_on, sweep.doubted, chain.max_drafts, strict=True)
        ]

    def _sweep(
        self, forward: PartialForward, position: Tensor, open_rows: list[bool], exits: list[tuple[int, int]]
    ) -> LayerSweep:
        """Bring the newest token of every open row up from one candidate layer to the next, and what waits there along, until
        a head is sure of the next token. exits: (number of the head, its layer)."""
        sweep = LayerSweep([0] * self.view.rows, forward.tokens[:, -1], doubted=[False] * self.view.rows)
        climbing = list(open_rows)  # rows without a prediction so far
        for index, layer in exits:
            forward.advance(layer, None if climbing == self.view.alive else climbing)
            path, active = forward.tokens[:, 1:], climbing if self.sampler.processed else None
            picked, scores = forward.tokens[:, -1], None  # [B]
            if self._picks_at_exits:
                transform = self.heads.transform(index)
                picked, confidence = self.model.engine.score_exit(forward.hidden[:, -1], transform, self.shortlist)  # [B] each
            else:
                logits = self.heads.logits(self.model, index, forward.hidden[:, -1:], self.shortlist)[:, 0]  # [B, V]
                scores = self.sampler.process(logits, path, active)
                confidence = scores.softmax(-1).amax(-1)  # [B]
            rows = (confidence > self.method.confidence_threshold) & on_device(climbing, confidence.device, torch.bool)
            predicts = rows.tolist()  # on an accelerator this waits: what runs next depends on it
            self.tallies.tested(layer, [sure for sure, asked in zip(predicts, climbing, strict=True) if asked])
            if self.method.recheck:
                doubts = self._doubts(forward, index, layer, climbing)
                sweep.doubted = [old or new for old, new in zip(sweep.doubted, doubts, strict=True)]
            if any(predicts):
                drawn = (picked, None) if scores is None else self.sampler.drawn(scores, position, path, active, self.coupled)
                sweep.take(layer, predicts, *drawn, confidence, rows)
                climbing = [asked and not sure for asked, sure in zip(climbing, predicts, strict=True)]
                if not any(climbing):
                    break
        return sweep

    def _doubts(self, forward: PartialForward, index: int, layer: int, rows: list[bool]) -> list[bool]:
        """Rows in which this head is sure of another token than a shallower head predicted, for a prediction whose
        predecessor has come up to this layer."""
        doubts: list[Tensor] = []  # one [B] bool per place
        for place in range(forward.width - 1):
            here = [
                climbs and forward.depth[row, place] == layer and self._predicted_at[row][place] < layer
                for row, climbs in enumerate(rows)
            ]
            if any(here):
                hidden = forward.hidden[:, place : place + 1]  # [B, 1, d]
                logits = self.heads.logits(self.model, index, hidden, self.shortlist)[:, 0]  # [B, V]
                scores = self.sampler.process(logits, forward.tokens[:, 1 : place + 1], here)
                confidence, token = scores.softmax(-1).max(-1)
                differs = token != forward.tokens[:, place + 1]
                doubts.append(
                    (confidence > self.method.confidence_threshold) & differs & on_device(here, differs.device, torch.bool)
                )
        return torch.stack(doubts).any(0).tolist() if doubts else [False] * self.view.rows

    def observe_commits(self, draft: Draft | None, verdicts: list[RowVerdict]) -> None:
        if draft is not None:
            self.tallies.record(self._predicted_at, verdicts, self._passes)
