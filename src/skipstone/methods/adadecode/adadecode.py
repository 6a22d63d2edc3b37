"""AdaDecode: Accelerating LLM Decoding with Adaptive Layer Parallelism
(Wei et al., ICML 2025, arXiv 2506.03700), section 2 and Algorithm 1.

A token climbs the layers from exit to exit. If the head of an exit is confident of the next token, that token starts at
layer 0, and the current one waits at the exit. The next token takes all waiting tokens along. When the newest token reaches the
top, one pass verifies all early predictions.

Deviations: the threshold applies to the head's most probable token, before the draw (by Eq. 1 it applies to the drawn token,
which biases sampling). A depth's list is emptied when it runs (never in Algorithm 1 as printed). After `num_speculative_tokens`
predictions the newest token climbs to the top without tests. Deeper heads may stop predicting (`recheck`, ours, off).
"""

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from skipstone.decoding import method_states
from skipstone.decoding.draft import Draft, RowVerdict
from skipstone.decoding.drafter import Candidate, Drafter, layers_used
from skipstone.decoding.method import Preset
from skipstone.decoding.sampling import Sampler
from skipstone.decoding.settings import RejectionRule, setting, whole_numbers
from skipstone.engines.engine import ChainInputs, SurvivalThresholds
from skipstone.engines.host_transfer import on_device
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.partial_forward import PartialForward
from skipstone.methods.adadecode.heads import ORIGINAL, ExitHeads, bundled_name_for, heads_fitting, load_heads, original_heads
from skipstone.methods.drafting.candidates import layer_candidate
from skipstone.methods.drafting.chain import ChainDrafter, DraftChain
from skipstone.methods.drafting.shortlist import ShortlistMethod
from skipstone.policy.draft_length import MAX_DRAFTS
from skipstone.utils.limits import SMALL_STATE_BYTES


@dataclass(frozen=True)
class AdaDecode(ShortlistMethod):
    """AdaDecode: small heads at middle layers predict tokens early."""

    name: ClassVar[str] = "adadecode"
    positional: ClassVar[str] = "lets tokens wait at different layers"
    aliases: ClassVar[dict[str, str]] = {
        "threshold": "confidence_threshold",
        "max_pending": "num_speculative_tokens",
        "num_assistant_tokens": "num_speculative_tokens",
    }
    presets: ClassVar[dict[str, Preset]] = {
        "paper": Preset(
            "Wei et al., section 2 and appendix D; `skipstone train heads --preset paper` trains the heads",
            {
                "confidence_threshold": 0.75,
                "num_speculative_tokens": 5,
                "exit_layers": (),
                "verification": True,
                "recheck": False,
                "rejection_sample_method": "standard",
            },
        )
    }
    if_few_accepted: ClassVar[str] = "An acceptance rate that low says that the heads are not trained for this model or text."

    heads: str | ExitHeads | None = setting(
        None, "a folder, a hub id or a bundled name of heads, or 'original': the model's own head; none: bundled heads"
    )
    confidence_threshold: float = setting(
        0.75, "gamma: predict early if the most probable token has a higher probability.", within=(0, 1)
    )
    num_speculative_tokens: int = setting(5, "early predictions a step.")
    exit_layers: tuple[int, ...] = setting((), "candidates among the heads' layers; empty for all.")
    verification: bool = setting(True, "False keeps every early prediction (Table 3; lossy).")
    recheck: bool = setting(False, "deeper heads test pending predictions again; a confident contradiction ends predicting.")
    rejection_sample_method: RejectionRule = setting(
        "standard",
        '"standard" is Eq. 2, "coupled" draws drafts from the target\'s own noise: same seed, same text as plain sampling.',
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "exit_layers", whole_numbers("exit_layers", self.exit_layers))

    @property
    def lossless(self) -> bool:
        return self.verification

    def check(self, model: ModelRunner) -> None:
        super().check(model)
        self.heads_for(model)

    def heads_for(self, model: ModelRunner) -> ExitHeads:
        """The heads for a model. ValueError for another model's heads; OSError if there are none."""
        if self.heads == ORIGINAL:
            return original_heads(model, self.exit_layers)
        if isinstance(self.heads, ExitHeads):
            heads = heads_fitting(self.heads, model)
        elif (source := bundled_name_for(model) if self.heads is None else self.heads) is None:
            raise ValueError(
                "no exit heads for this model: `skipstone train heads MODEL` makes some for heads=FOLDER "
                '(heads="original" predicts with the model\'s own head)'
            )
        else:
            heads = load_heads(source, model)
        if wrong := [layer for layer in self.exit_layers if layer not in heads.card.layers]:
            raise ValueError(f"exit_layers must be among the heads' layers, {list(heads.card.layers)}, found {wrong}")
        return heads

    def shortlist(self, drafter: ModelRunner) -> Tensor | None:
        """As in `ShortlistMethod`. Without `draft_vocabulary` it is the heads' own shortlist."""
        return self.heads_for(drafter).shortlist if self.draft_vocabulary is None else super().shortlist(drafter)

    def create_drafter(self, model: ModelRunner, rows: int, capacity: int) -> Drafter:
        return AdaDecodeDrafter(self, model, rows)

    def auto_candidates(self, model: ModelRunner, rows: int, capacity: int) -> dict[str, Candidate]:
        """One candidate per head. It drafts chains, and `auto` decides their length."""
        heads, shortlist, candidates = self.heads_for(model), self.shortlist(model), dict[str, Candidate]()
        for number, layer in enumerate(heads.card.layers):
            if not self.exit_layers or layer in self.exit_layers:
                drafter = HeadChainDrafter(heads, number, model, rows, shortlist)
                candidates[f"adadecode, head {layer}"] = layer_candidate(drafter, self, model, layer)
        return candidates


@dataclass
class ExitCounts:
    """Counts of one exit. tests: tokens tested. predicted: tests above the threshold. accepted, rejected: verified predictions;
    predictions after a rejected one count as neither."""

    tests: int = 0
    predicted: int = 0
    accepted: int = 0
    rejected: int = 0


class AdaDecodeCounts:
    """Counts of all steps. exits: layer -> counts of its exit. tests: number of tests, each of one or several rows. stops:
    number of tests between two passes. passes: (from layer, to layer, tokens) -> number of passes."""

    def __init__(self, layers: list[int]) -> None:
        self.exits = {layer: ExitCounts() for layer in layers}
        self.steps = self.drafted_steps = self.tests = self.stops = 0
        self.passes: dict[tuple[int, int, int], int] = {}

    @property
    def nbytes(self) -> int:
        return SMALL_STATE_BYTES

    def tested(self, layer: int, predicted: list[bool], stopped: bool = True) -> None:
        """Count one test. predicted: for each tested row whether it predicts. stopped: whether the test ended a pass."""
        self.tests += 1
        self.stops += stopped
        self.exits[layer].tests += len(predicted)
        self.exits[layer].predicted += sum(predicted)

    def record(self, exits: list[list[int]], verdicts: list[RowVerdict], passes: list[tuple[int, int, int]]) -> None:
        """Count the results of a step. exits: per row, the layers that predicted its drafts."""
        for layers, verdict in zip(exits, verdicts, strict=True):
            for layer in layers[: len(verdict.path)]:
                self.exits[layer].accepted += 1
            if verdict.tokens and not verdict.finished and len(verdict.path) < len(layers):
                self.exits[layers[len(verdict.path)]].rejected += 1
        for key in passes:
            self.passes[key] = self.passes.get(key, 0) + 1
        self.steps += 1
        self.drafted_steps += any(exits)

    def report(self) -> dict[str, Any]:
        """Plain JSON values. passes: "from layer, to layer, tokens" -> number."""
        return {
            "steps": self.steps,
            "drafted_steps": self.drafted_steps,
            "tests": self.tests,
            "stops": self.stops,
            "exits": {str(layer): asdict(tally) for layer, tally in self.exits.items()},
            "passes": {"{}, {}, {}".format(*key): count for key, count in sorted(self.passes.items())},
        }


@dataclass
class LayerSweep:
    """Results of one climb of every row's newest token: at most one prediction per row.

    layers: per row, the layer that predicted its next token, 0 if none did. token: [B] int64, q: [B, V] or None, confidence:
    [B] float; arbitrary for rows without a prediction. doubted: rows in which a deeper head contradicts an earlier prediction
    (`recheck`). They predict no further token.
    """

    layers: list[int]
    token: Tensor
    q: Tensor | None = None
    confidence: Tensor | None = None
    doubted: list[bool] = field(default_factory=list)

    def take(self, layer: int, predicts: list[bool], token: Tensor, q: Tensor | None, confidence: Tensor, rows: Tensor) -> None:
        """Add the predictions of a layer's head for some rows: `predicts` on the host, `rows` [B] bool on the device."""
        self.layers = [layer if predicted else before for predicted, before in zip(predicts, self.layers, strict=True)]
        self.token = torch.where(rows, token, self.token)
        self.confidence = confidence if self.confidence is None else torch.where(rows, confidence, self.confidence)
        if q is not None:
            self.q = q if self.q is None else torch.where(rows[:, None], q, self.q)


class HeadChainDrafter(ChainDrafter):
    """A candidate of `auto`: it drafts chains with the first layers of the target and exit head number `number`."""

    def __init__(self, heads: ExitHeads, number: int, model: ModelRunner, rows: int, shortlist: Tensor | None) -> None:
        layer = heads.card.layers[number]
        super().__init__(model, rows, max_drafts=MAX_DRAFTS, threshold=None, coupled=True, exit_layer=layer)
        self.heads, self.number, self.shortlist = heads, number, shortlist
        if heads.linear:
            self.transform = heads.transform(number)

    def one_call(self) -> tuple[int, None] | None:
        return (self.layers, None) if self.heads.linear else None

    def next_logits(self, chain: DraftChain, forward: PartialForward) -> Tensor:
        forward.advance(self.layers)
        return self.read_states(forward.hidden[:, -1:])[:, 0]

    def read_states(self, states: Tensor) -> Tensor:
        return self.heads.logits(self.model, self.number, states, self.shortlist)


class AdaDecodeDrafter(Drafter):
    """Drafts tokens that wait at different layers. The scoring pass runs all of them to the top.

    Each row has its own predictions, and sweeps are common to all rows. A row stops drafting when no head is confident."""

    def __init__(self, method: AdaDecode, model: ModelRunner, rows: int) -> None:
        self.model, self.method, self.shortlist = model, method, method.shortlist(model)
        self.coupled = method.rejection_sample_method == "coupled"
        self.heads = heads = method.heads_for(model)
        self.needs_verification = method.verification
        self.own_threads = heads.card.kind != "full"  # torch computes the product of a full head
        layers = [layer for layer in heads.card.layers if not method.exit_layers or layer in method.exit_layers]
        self.exits = [(heads.card.layers.index(layer), layer) for layer in layers]  # (number of the head, its layer)
        self.tallies = method_states.method_state(method, model, rows, heads, lambda: AdaDecodeCounts(layers))
        # of this step
        self._predicted_at: list[list[int]] = [[] for _ in range(rows)]  # per row, the layers of its predictions
        self._passes: list[tuple[int, int, int]] = []  # (from layer, to layer, tokens)

    @property
    def sampler(self) -> Sampler:
        return self.view.sampler

    def describe(self, name: str) -> list[dict[str, Any]]:
        return [layers_used(name, exits=[layer for _, layer in self.exits])]

    @property
    def _picks_at_exits(self) -> bool:
        """Whether the engine computes a head's likeliest token and its probability itself."""
        model = self.model
        return self.sampler.uses_argmax_only and self.heads.linear and model.engine.supports_chains and model.uses_engine_argmax

    def propose_draft(self, limits: list[int], stop_rule: SurvivalThresholds | None = None) -> Draft:
        """Algorithm 1 up to the verification: each sweep predicts one more token."""
        chain = DraftChain(
            [min(self.method.num_speculative_tokens, allowed) for allowed in limits], self.view.alive, self.model.device
        )
        forward = self.view.start_forward(chain.max_drafts, self.shortlist)
        self._predicted_at, self._passes = [[] for _ in range(self.view.rows)], forward.passes
        position = forward.positions[:, 0] + 1  # [B]
        open_rows = chain.open_rows()
        layers, exits = self._draft_at_first_exit(chain, forward)
        for place in range(len(layers), chain.width):
            sweep = self._sweep(forward, position + place, open_rows, exits)
            exits = self.exits
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

    def _draft_at_first_exit(self, chain: DraftChain, forward: PartialForward) -> tuple[list[list[int]], list[tuple[int, int]]]:
        """For one greedy row: all tokens that the first exit predicts in succession, in one engine call.

        Returns (the layers of every place, as in LayerSweep; the exits that the newest token has not reached).
        """
        if self.view.rows > 1 or self.method.recheck or not self._picks_at_exits:
            return [], self.exits
        index, layer = self.exits[0]
        thresholds, transform = [self.method.confidence_threshold], self.heads.transform(index)
        inputs = ChainInputs(
            chain.max_drafts, thresholds, self.sampler.eos, layer, None, transform, excludes_uncertain=True, keep_states=True
        )
        drafts = forward.draft_greedily(inputs)
        if drafts is None:
            return [], self.exits
        assert drafts.confidence is not None, "thresholds were given"
        count = drafts.counts[0]
        for token, confidence in zip(drafts.tokens.unbind(1), drafts.confidence.unbind(1), strict=True):
            chain.add(token, None, confidence)
        ended = count == chain.width or (count and int(drafts.tokens[0, -1]) in self.sampler.eos[0])
        for predicted in [True] * count + [False] * (not ended):
            self.tallies.tested(layer, [predicted], stopped=False)
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
                forward.depth[row, -1] = forward.top  # the column has no token in this row, so no layer needs to run
        unfinished = self.sampler.unfinished(sweep.token)
        open_rows = [True] * self.view.rows if unfinished is None else unfinished.tolist()
        columns = zip(sweep.layers, open_rows, sweep.doubted, chain.max_drafts, strict=True)
        return [layer > 0 and is_open and not doubted and len(chain) < limit for layer, is_open, doubted, limit in columns]

    def _sweep(
        self, forward: PartialForward, position: Tensor, open_rows: list[bool], exits: list[tuple[int, int]]
    ) -> LayerSweep:
        """Run the newest token of every open row up to the first exit that predicts the next token, with all waiting tokens.

        exits: (number of the head, its layer)."""
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
            predicts = rows.tolist()  # an accelerator synchronises here, because the next layers depend on it
            self.tallies.tested(layer, [predicted for predicted, tested in zip(predicts, climbing, strict=True) if tested])
            if self.method.recheck:
                doubts = self._find_doubts(forward, index, layer, climbing)
                sweep.doubted = [old or new for old, new in zip(sweep.doubted, doubts, strict=True)]
            if any(predicts):
                drawn = (picked, None) if scores is None else self.sampler.drawn(scores, position, path, active, self.coupled)
                sweep.take(layer, predicts, *drawn, confidence, rows)
                climbing = [climbs and not predicted for climbs, predicted in zip(climbing, predicts, strict=True)]
                if not any(climbing):
                    break
        return sweep

    def _find_doubts(self, forward: PartialForward, index: int, layer: int, rows: list[bool]) -> list[bool]:
        """Rows in which this head contradicts a prediction of a shallower head with confidence.

        It tests predictions that follow a token at this layer."""
        doubts: list[Tensor] = []  # one [B] bool per place
        for place in range(forward.width - 1):
            tested = [
                climbs and forward.depth[row, place] == layer and self._predicted_at[row][place] < layer
                for row, climbs in enumerate(rows)
            ]
            if any(tested):
                hidden = forward.hidden[:, place : place + 1]  # [B, 1, d]
                logits = self.heads.logits(self.model, index, hidden, self.shortlist)[:, 0]  # [B, V]
                scores = self.sampler.process(logits, forward.tokens[:, 1 : place + 1], tested)
                confidence, token = scores.softmax(-1).max(-1)
                differs = token != forward.tokens[:, place + 1]
                is_confident = confidence > self.method.confidence_threshold
                doubts.append(is_confident & differs & on_device(tested, differs.device, torch.bool))
        return torch.stack(doubts).any(0).tolist() if doubts else [False] * self.view.rows

    def observe_commits(self, draft: Draft | None, verdicts: list[RowVerdict]) -> None:
        if draft is not None:
            self.tallies.record(self._predicted_at, verdicts, self._passes)
