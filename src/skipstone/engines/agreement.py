"""Whether skipstone computes a model as the model does itself: layer by layer, alone, in ragged batches, in trees (where layers
have states without positions, in chains that are rolled back), past the window.

The reference is the trace of the model's own forward that its family was derived from. Every layer is given what it was given
there, so that a difference is the layer's own. What comes out must be the same up to rounding.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from skipstone.engines.eager import patches
from skipstone.engines.eager.eager import EagerEngine
from skipstone.engines.host_transfer import on_device
from skipstone.engines.kv_cache import KVCache
from skipstone.models.decoder_model import DecoderModel
from skipstone.models.families import attention_reaches, text_config
from skipstone.models.nan_checks import overflow, refuse_not_finite
from skipstone.models.passes import Pass, Tree
from skipstone.models.recognition import UNEXPECTED, recognise, traced
from skipstone.models.trace import PREFIX, Trace, shrunk_windows

EXACT = 1e-3  # share of a layer's change of a token by which float32 and float64 results may differ
ROUNDED = 0.05  # the same in half precision, beside what rounding does to the whole state
# the same through quantised kernels, some of which round a token by those beside it. Tiny Llamas and Mistrals by all of them:
# at most 0.019; where two channels are up to 30 times the others, 0.056 (bitsandbytes, 8 bit, bfloat16). Phases or a window
# wrong by one token: at least 0.48
QUANTISED = 0.15
CUT = 10  # tokens of the first chunk of row 0, past the windows that models have while they are traced
SHORT = 8  # tokens of the first chunk of row 1, which then is padded
ALONE = 5  # tokens of a prompt by itself: so few that windows leave masks out
TAKEN = 2  # tokens that are accepted of a chain that is rolled back


class ComparedPass(NamedTuple):
    """A pass that is compared, or only run. rows, columns: [2, n], of the trace, that its tokens are. committed: tokens of both
    rows of the store before it. drafts: its tokens are nobody's, and what comes out is not compared."""

    name: str
    at: Pass
    rows: Tensor
    columns: Tensor
    committed: list[int]
    drafts: bool = False


@dataclass
class LargestDifference:
    """The largest difference so far. allowed: as a share. precision: by which every number may be rounded otherwise, as a share
    of it. where: what the difference is of. share: of what was to be computed, the most of any token."""

    allowed: float
    precision: float
    where: str = "nothing"
    share: float = 0.0

    def look(self, where: str, mine: Tensor, theirs: Tensor, before: Tensor | None = None) -> None:
        """Take over one result [..., d] beside what it should be. before: what a layer was given, of which it is to compute the
        change; None where there is none."""
        mine, theirs = mine.float(), theirs.to(mine.device).float()
        size = (theirs if before is None else theirs - before.float()).norm(dim=-1)
        apart = ((mine - theirs).norm(dim=-1) - self.precision * theirs.norm(dim=-1)).clamp(min=0)
        share = float((apart / size.clamp(min=1e-6)).max())
        if not share <= self.share:  # a nan, too
            self.where, self.share = where, share


@torch.no_grad()
def ensure(model: Any, description: DecoderModel) -> None:
    """Verify a model whose class and shape of config have not been verified yet. ValueError with the difference where what
    skipstone computes is not what the model computes."""
    known = recognise(model)
    if known.is_verified:
        return
    kind = model.config.model_type
    try:
        engine = EagerEngine(model, description)
        config = text_config(model)
        with shrunk_windows(config):
            engine.reaches = attention_reaches(config, description.family)
        difference = disagreement(engine, description, traced(model))
    except torch.OutOfMemoryError:
        raise
    except UNEXPECTED as error:
        refuse_not_finite(model)
        raise ValueError(f"the layers of this {kind} model cannot be run one by one: {error}") from error
    finally:
        patches.take_off(model)
    if not difference.share <= difference.allowed:
        refuse_not_finite(model)
        if difference.share != difference.share:
            raise ValueError(
                f"{difference.where} of this {kind} model is NaN or infinite for a few tokens, "
                f"and {overflow(description.weight_dtype)}"
            )
        raise ValueError(
            f"skipstone does not compute this {kind} model as its own forward does: {difference.where} "
            f"differs by {difference.share:.2g} of its size, where {difference.allowed:g} is allowed"
        )
    known.verified()


def disagreement(engine: EagerEngine, description: DecoderModel, found: Trace) -> LargestDifference:
    """The largest difference between an engine and a trace."""
    difference = LargestDifference(_allowed(description), torch.finfo(description.weight_dtype).eps)
    ids, length = found.ids, found.ids.shape[1]
    positions = torch.arange(length, device=ids.device, dtype=torch.int64).expand(2, -1)
    folded = description.family.folded  # several streams of states are compared as one: a difference in any of them counts
    first = folded(found.layers[0][1].given[""])
    size = first.shape[-1]
    entered = engine.embed(ids, positions)
    beside = entered[..., size:]  # what layers are given beside the hidden states
    difference.look("what enters layer 0", entered[..., :size], first)
    store = KVCache(2, len(description.layers), 2 * length)
    store.reserve(2 * length)
    passes = _passes(length, ids.device, bool(description.family.recurrent))
    apart, alone = KVCache(1, len(description.layers), length), _alone(length, ids.device)
    apart.reserve(length)
    for index, call in found.layers:
        output = call.output[0] if isinstance(call.output, (tuple, list)) else call.output
        given, returned = folded(call.given[""]).to(ids.device), folded(output).to(ids.device)  # layers may be on several
        for name, at, rows, columns, committed, drafts in passes:
            store.length = committed
            states = torch.cat([given, beside], -1)[rows, columns]
            mine = engine.run(states, at, store, range(index, index + 1))[..., :size]
            kept = torch.ones_like(columns, dtype=torch.bool) if at.valid is None else at.valid
            if not drafts:
                before = given[rows, columns][kept]
                difference.look(f"layer {index} {name}", mine[kept], returned[rows, columns][kept], before)
        for name, at in alone:
            place = slice(at.first_slot or 0, at.extent)
            apart.length = [at.first_slot or 0]
            states = torch.cat([given, beside], -1)[:1, place]
            mine = engine.run(states, at, apart, range(index, index + 1))[..., :size]
            difference.look(f"layer {index} {name}", mine, returned[:1, place], given[:1, place])
    last = found.layers[-1][1].output
    last = (last[0] if isinstance(last, (tuple, list)) else last).to(ids.device)
    difference.look("the logits", engine.project(engine.normed(folded(last))), found.logits)
    return difference


def _allowed(description: DecoderModel) -> float:
    """The share by which results may differ."""
    if description.is_quantised:
        return QUANTISED
    return EXACT if description.weight_dtype in (torch.float32, torch.float64) else ROUNDED


def _alone(length: int, device: Any) -> list[tuple[str, Pass]]:
    """What plain decoding runs of one row: its first tokens, without a mask where that is left out, and one more."""
    count = min(ALONE, length - 1)
    prompt, token = (torch.arange(count, device=device, dtype=torch.int64)[None], on_device([[count]], device))
    row = slice(0, 1)
    return [
        ("alone", Pass(prompt, prompt, None, row, count, 0)),
        ("one token at a time", Pass(token, token, None, row, count + 1, count)),
    ]


def _passes(length: int, device: Any, chains: bool) -> list[ComparedPass]:
    """All passes that are compared.

    Row 0 of the store reads what both rows of the trace begin with in a first chunk and as the trunk of a tree, of which both
    their ends are the branches. Row 1 reads the second row of the trace in chunks of its own. chains: both read chains instead
    of the tree, and a second chunk instead of its trunk.
    """
    prefix = min(PREFIX, length - 1)
    cut, short = min(CUT, prefix - 1), min(SHORT, prefix - 2)
    first = torch.arange(cut, device=device, dtype=torch.int64).expand(2, -1)
    valid = torch.arange(cut, device=device, dtype=torch.int64) < on_device([[cut], [short]], device)
    first = torch.where(valid, first, 0)
    own, everyone = on_device([[0], [1]], device), slice(0, 2)
    ragged = ComparedPass("in a ragged batch", Pass(first, first, valid, everyone, cut), own.expand(-1, cut), first, [0, 0])
    if not chains:
        return [ragged, _tree(prefix, [cut, short], length, own)]
    rest = torch.arange(prefix - cut, device=device, dtype=torch.int64)[None] + on_device([[cut], [short]], device)  # [2, n]
    chunk = ComparedPass(
        "in a chunk", Pass(rest, rest, None, everyone, prefix), own.expand(-1, prefix - cut), rest, [cut, short]
    )
    return [ragged, chunk, *_chains([prefix, short + prefix - cut], length, own)]


def _chains(starts: list[int], length: int, own: Tensor) -> list[ComparedPass]:
    """A chain of which the first TAKEN tokens are accepted and the others, which are the other row's, are not; then the right
    ones, the last of them by itself. starts: tokens of both rows before it. own: [2, 1], the rows of the trace."""
    left = length - max(starts)
    taken = min(TAKEN, left - 1)
    accepted = [start + taken for start in starts]

    def chain(name: str, begin: int, width: int, committed: list[int], drafts: bool = False) -> ComparedPass:
        places = on_device([[start + begin + column for column in range(width)] for start in starts], own.device)
        rows = (1 - own if drafts else own).expand(-1, width)
        return ComparedPass(name, Pass(places, places, None, slice(0, 2), length), rows, places, committed, drafts)

    passes = [
        (taken, chain("in a draft", 0, taken, starts)),
        (left - taken, chain("in a draft that is rejected", taken, left - taken, starts, True)),
        (left - taken - 1, chain("behind a rejected draft", taken, left - taken - 1, accepted)),
        (1, chain("as a single token", left - 1, 1, [start + left - 1 for start in starts])),
    ]
    return [one for width, one in passes if width]


def _tree(prefix: int, starts: list[int], length: int, own: Tensor) -> ComparedPass:
    """On row 0 the rest of the first `prefix` tokens and behind them both ends, as a trunk and its branches, and the rest of
    row 1. starts: tokens of both rows before it. own: [2, 1], the rows of the trace."""
    trunk, ends, device = prefix - starts[0], length - prefix, own.device
    width = trunk + 2 * ends
    branches = torch.arange(prefix, length, device=device, dtype=torch.int64).repeat(2)
    chain = torch.arange(starts[1], starts[1] + width, device=device, dtype=torch.int64).clamp(max=length - 1)
    places = torch.stack(
        [torch.cat([torch.arange(starts[0], prefix, device=device, dtype=torch.int64), branches]), chain]
    )  # [2, width]
    real = torch.ones_like(places, dtype=torch.bool)
    real[1, length - starts[1] :] = False
    everything = torch.ones((width, width), dtype=torch.bool, device=device).tril()
    forked = everything.clone()
    forked[trunk + ends :, trunk : trunk + ends] = False  # the second branch does not see the first
    base = on_device(starts, device)
    tree = Tree(base, torch.stack([forked, everything]), places)
    sources = own.repeat(1, width)
    sources[0, trunk + ends :] = 1  # the second branch is the end of the trace's second row
    slots = base[:, None] + torch.arange(width, device=device, dtype=torch.int64)
    at = Pass(places, slots, real, slice(0, 2), max(starts) + width, tree=tree)
    return ComparedPass("in a tree", at, sources, places, starts)
