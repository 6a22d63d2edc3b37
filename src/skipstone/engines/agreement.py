"""Verifies that skipstone computes a model's layers as the model's own forward does.

The reference is the trace of the model's own forward that its family was derived from. Every layer gets the inputs that it had
there, so a difference is caused by that layer alone. Outputs must be equal up to rounding in each of these passes: one row
alone, ragged batches, trees (rolled-back chains if layers have recurrent states), texts longer than a window.
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

# Largest allowed difference, as a share of a layer's change of a token:
EXACT = 1e-3  # in float32 and float64
ROUNDED = 0.05  # in half precision, after the rounding of the whole state is subtracted
# Through quantised kernels. Some round a token by its neighbours. All of them stay below 0.019 on tiny Llamas and
# Mistrals; bitsandbytes (8 bit, bfloat16) reaches 0.056 if two channels are up to 30 times the others. Phases or a window that
# are wrong by one token differ by at least 0.48.
QUANTISED = 0.15
FIRST_CHUNK = 10  # tokens of row 0's first chunk, longer than the windows during a trace
SHORT_CHUNK = 8  # tokens of row 1's first chunk, which is padded
PROMPT_TOKENS = 5  # tokens of the prompt of one row alone: so few that no window needs a mask
ACCEPTED_TOKENS = 2  # accepted tokens of a chain that is rolled back


class ComparedPass(NamedTuple):
    """A pass and the trace's tokens that it runs. rows, columns: [2, n], the place of every token in the trace. committed:
    earlier tokens of the store's rows. drafts: the tokens are rejected later, and their outputs are not compared."""

    name: str
    at: Pass
    rows: Tensor
    columns: Tensor
    committed: list[int]
    drafts: bool = False


@dataclass
class LargestDifference:
    """The largest difference so far. allowed: as a share. precision: relative rounding error of every number, subtracted from
    differences. where: the layer and pass that differ. share: the difference relative to the expected size, the largest of any
    token."""

    allowed: float
    precision: float
    where: str = "nothing"
    share: float = 0.0

    def add(self, where: str, result: Tensor, expected: Tensor, inputs: Tensor | None = None) -> None:
        """Compare one result [..., d] with its expected value. inputs: of the layer, so that its change of them is the size to
        compare with; None to take the expected value's size."""
        result, expected = result.float(), expected.to(result.device).float()
        size = (expected if inputs is None else expected - inputs.float()).norm(dim=-1)
        error = ((result - expected).norm(dim=-1) - self.precision * expected.norm(dim=-1)).clamp(min=0)
        share = float((error / size.clamp(min=1e-6)).max())
        if not share <= self.share:  # also true for NaN
            self.where, self.share = where, share


@torch.no_grad()
def ensure(model: Any, description: DecoderModel) -> None:
    """Verify a model if its class and shape of config have not been verified yet. ValueError with the difference if skipstone's
    results are not the model's."""
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


def disagreement(engine: EagerEngine, description: DecoderModel, reference: Trace) -> LargestDifference:
    """The largest difference between an engine and a trace."""
    difference = LargestDifference(_allowed(description), torch.finfo(description.weight_dtype).eps)
    ids, length = reference.ids, reference.ids.shape[1]
    positions = torch.arange(length, device=ids.device, dtype=torch.int64).expand(2, -1)
    folded = description.family.folded  # joins several streams of states into one tensor
    first = folded(reference.layers[0][1].given[""])
    size = first.shape[-1]
    embedded = engine.embed(ids, positions)
    extra_inputs = embedded[..., size:]  # inputs of layers in addition to the hidden states
    difference.add("what enters layer 0", embedded[..., :size], first)
    store = KVCache(2, len(description.layers), 2 * length)
    store.reserve(2 * length)
    passes = _batch_passes(length, ids.device, bool(description.family.recurrent))
    single_store, single_passes = KVCache(1, len(description.layers), length), _single_row_passes(length, ids.device)
    single_store.reserve(length)
    for index, call in reference.layers:
        output = call.output[0] if isinstance(call.output, (tuple, list)) else call.output
        given, returned = folded(call.given[""]).to(ids.device), folded(output).to(ids.device)  # layers may be on several
        states, layers = torch.cat([given, extra_inputs], -1), range(index, index + 1)
        for name, at, rows, columns, committed, drafts in passes:
            store.length = committed
            result = engine.run(states[rows, columns], at, store, layers)[..., :size]
            valid = torch.ones_like(columns, dtype=torch.bool) if at.valid is None else at.valid
            if not drafts:
                expected, inputs = returned[rows, columns][valid], given[rows, columns][valid]
                difference.add(f"layer {index} {name}", result[valid], expected, inputs)
        for name, at in single_passes:
            span = slice(at.first_slot or 0, at.extent)
            single_store.length = [at.first_slot or 0]
            result = engine.run(states[:1, span], at, single_store, layers)[..., :size]
            difference.add(f"layer {index} {name}", result, returned[:1, span], given[:1, span])
    last = reference.layers[-1][1].output
    last = (last[0] if isinstance(last, (tuple, list)) else last).to(ids.device)
    difference.add("the logits", engine.project(engine.normed(folded(last))), reference.logits)
    return difference


def _allowed(description: DecoderModel) -> float:
    """The allowed difference of a model."""
    if description.is_quantised:
        return QUANTISED
    return EXACT if description.weight_dtype in (torch.float32, torch.float64) else ROUNDED


def _single_row_passes(length: int, device: Any) -> list[tuple[str, Pass]]:
    """The passes of plain decoding of one row: a prompt, which may need no mask, and one more token."""
    count = min(PROMPT_TOKENS, length - 1)
    prompt, token = (torch.arange(count, device=device, dtype=torch.int64)[None], on_device([[count]], device))
    row = slice(0, 1)
    return [
        ("alone", Pass(prompt, prompt, None, row, count, 0)),
        ("one token at a time", Pass(token, token, None, row, count + 1, count)),
    ]


def _batch_passes(length: int, device: Any, chains: bool) -> list[ComparedPass]:
    """All passes over two rows.

    Row 0 of the store reads the rows' common prefix in a first chunk and as the trunk of a tree. The ends of both rows are the
    tree's branches. Row 1 reads the trace's second row in chunks. chains: both rows read a second chunk and chains instead of
    the tree.
    """
    prefix = min(PREFIX, length - 1)
    cut, short = min(FIRST_CHUNK, prefix - 1), min(SHORT_CHUNK, prefix - 2)
    first = torch.arange(cut, device=device, dtype=torch.int64).expand(2, -1)
    valid = torch.arange(cut, device=device, dtype=torch.int64) < on_device([[cut], [short]], device)
    first = torch.where(valid, first, 0)
    row_numbers, both_rows = on_device([[0], [1]], device), slice(0, 2)
    ragged = Pass(first, first, valid, both_rows, cut)
    passes = [ComparedPass("in a ragged batch", ragged, row_numbers.expand(-1, cut), first, [0, 0])]
    if not chains:
        return [*passes, _tree(prefix, [cut, short], length, row_numbers)]
    rest = torch.arange(prefix - cut, device=device, dtype=torch.int64)[None] + on_device([[cut], [short]], device)  # [2, n]
    chunk = Pass(rest, rest, None, both_rows, prefix)
    passes.append(ComparedPass("in a chunk", chunk, row_numbers.expand(-1, prefix - cut), rest, [cut, short]))
    return [*passes, *_chains([prefix, short + prefix - cut], length, row_numbers)]


def _chains(starts: list[int], length: int, row_numbers: Tensor) -> list[ComparedPass]:
    """A chain with ACCEPTED_TOKENS right tokens, then tokens of the other row, which are rejected; then the right ones, the
    last of them alone. starts: earlier tokens of both rows. row_numbers: [2, 1], the rows of the trace."""
    remaining = length - max(starts)
    accepted = min(ACCEPTED_TOKENS, remaining - 1)
    committed = [start + accepted for start in starts]

    def chain(name: str, begin: int, width: int, committed: list[int], drafts: bool = False) -> ComparedPass:
        places = on_device([[start + begin + column for column in range(width)] for start in starts], row_numbers.device)
        rows = (1 - row_numbers if drafts else row_numbers).expand(-1, width)
        return ComparedPass(name, Pass(places, places, None, slice(0, 2), length), rows, places, committed, drafts)

    passes = [
        (accepted, chain("in a draft", 0, accepted, starts)),
        (remaining - accepted, chain("in a draft that is rejected", accepted, remaining - accepted, starts, True)),
        (remaining - accepted - 1, chain("behind a rejected draft", accepted, remaining - accepted - 1, committed)),
        (1, chain("as a single token", remaining - 1, 1, [start + remaining - 1 for start in starts])),
    ]
    return [compared for width, compared in passes if width]


def _tree(prefix: int, starts: list[int], length: int, row_numbers: Tensor) -> ComparedPass:
    """On row 0 a tree: the rest of the first `prefix` tokens is the trunk, the ends of both rows are its branches. On row 1 the
    rest of that row. starts: earlier tokens of both rows. row_numbers: [2, 1], the rows of the trace."""
    trunk, ends, device = prefix - starts[0], length - prefix, row_numbers.device
    width = trunk + 2 * ends
    branches = torch.arange(prefix, length, device=device, dtype=torch.int64).repeat(2)
    chain = torch.arange(starts[1], starts[1] + width, device=device, dtype=torch.int64).clamp(max=length - 1)
    places = torch.stack(
        [torch.cat([torch.arange(starts[0], prefix, device=device, dtype=torch.int64), branches]), chain]
    )  # [2, width]
    valid = torch.ones_like(places, dtype=torch.bool)
    valid[1, length - starts[1] :] = False
    causal = torch.ones((width, width), dtype=torch.bool, device=device).tril()
    forked = causal.clone()
    forked[trunk + ends :, trunk : trunk + ends] = False  # the second branch does not see the first
    base = on_device(starts, device)
    tree = Tree(base, torch.stack([forked, causal]), places)
    rows = row_numbers.repeat(1, width)
    rows[0, trunk + ends :] = 1  # the second branch is the end of the trace's second row
    slots = base[:, None] + torch.arange(width, device=device, dtype=torch.int64)
    at = Pass(places, slots, valid, slice(0, 2), max(starts) + width, tree=tree)
    return ComparedPass("in a tree", at, rows, places, starts)
