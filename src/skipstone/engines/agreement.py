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
    """A pass and the trace's tokens that it runs. rows, columns: [b, n], the place of every token in the trace. committed:
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


def ensure(model: Any, description: DecoderModel) -> None:
    """Verify a model if its class and shape of config have not been verified yet. Errors as in `verify`."""
    known = recognise(model)
    if not known.is_verified:
        verify(model, description)
        known.verified()


@torch.no_grad()
def verify(model: Any, description: DecoderModel) -> None:
    """ValueError with the difference if skipstone's results are not the model's."""
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
    passes = _passes(length, ids.device, bool(description.family.recurrent))
    stores = {rows: KVCache(rows, len(description.layers), 2 * length) for rows in (1, 2)}
    for store in stores.values():
        store.reserve(2 * length)
    for index, call in reference.layers:
        output = call.output[0] if isinstance(call.output, (tuple, list)) else call.output
        given, returned = folded(call.given[""]).to(ids.device), folded(output).to(ids.device)  # layers may be on several
        states = torch.cat([given, extra_inputs], -1)
        for name, at, rows, columns, committed, drafts in passes:
            store = stores[len(rows)]
            store.length = committed
            result = engine.run(states[rows, columns], at, store, range(index, index + 1))[..., :size]
            valid = torch.ones_like(columns, dtype=torch.bool) if at.valid is None else at.valid
            if not drafts:
                expected, inputs = returned[rows, columns][valid], given[rows, columns][valid]
                difference.add(f"layer {index} {name}", result[valid], expected, inputs)
    last = reference.layers[-1][1].output
    last = (last[0] if isinstance(last, (tuple, list)) else last).to(ids.device)
    difference.add("the logits", engine.project(engine.normed(folded(last))), reference.logits)
    return difference


def _allowed(description: DecoderModel) -> float:
    """The allowed difference of a model."""
    if description.is_quantised:
        return QUANTISED
    return EXACT if description.weight_dtype in (torch.float32, torch.float64) else ROUNDED


def _passes(length: int, device: Any, recurrent: bool) -> list[ComparedPass]:
    """All compared passes over a trace with `length` tokens per row.

    One row reads a prompt, which may need no mask, and one more token. Of two rows of the store, row 0 reads the trace's common
    prefix in a first chunk and as the trunk of a tree. The ends of both rows of the trace are the tree's branches. Row 1 reads
    the trace's second row in chunks.

    recurrent: in place of the tree both rows read a second chunk and a chain with ACCEPTED_TOKENS right tokens. Tokens of the
    other row follow, which are rejected. The right ones follow them, the last of them alone.
    """
    prompt, prefix = min(PROMPT_TOKENS, length - 1), min(PREFIX, length - 1)
    cut, short = min(FIRST_CHUNK, prefix - 1), min(SHORT_CHUNK, prefix - 2)
    passes = [
        _chain("alone", [(0, 0, prompt)], device),
        _chain("one token at a time", [(0, prompt, prompt + 1)], device),
        _chain("in a ragged batch", [(0, 0, cut), (1, 0, short)], device),
    ]
    if not recurrent:
        return [*passes, _tree(prefix, [cut, short], length, device)]
    starts, remaining = [prefix, short + prefix - cut], length - prefix
    accepted = min(ACCEPTED_TOKENS, remaining - 1)
    passes.append(_chain("in a chunk", [(0, cut, prefix), (1, short, starts[1])], device))
    for name, begin, end, drafts in (
        ("in a draft", 0, accepted, False),
        ("in a draft that is rejected", accepted, remaining, True),
        ("behind a rejected draft", accepted, remaining - 1, False),
        ("as a single token", remaining - 1, remaining, False),
    ):
        if begin < end:
            spans = [(1 - row if drafts else row, start + begin, start + end) for row, start in enumerate(starts)]
            compared = _chain(name, spans, device)
            passes.append(compared._replace(committed=starts, drafts=True) if drafts else compared)
    return passes


def _chain(name: str, spans: list[tuple[int, int, int]], device: Any) -> ComparedPass:
    """A padded pass over tokens of the trace. spans: (row, start, stop) in the trace, for each row of the store."""
    steps = range(max(stop - start for _, start, stop in spans))
    valid = [[start + step < stop for step in steps] for _, start, stop in spans]
    columns = on_device([[start + step if start + step < stop else 0 for step in steps] for _, start, stop in spans], device)
    rows, starts = on_device([[row] * len(steps) for row, _, _ in spans], device), [start for _, start, _ in spans]
    mask = None if all(map(all, valid)) else on_device(valid, device)
    extent, first_slot = max(stop for _, _, stop in spans), starts[0] if len(spans) == 1 else None
    return ComparedPass(name, Pass(columns, columns, mask, slice(0, len(spans)), extent, first_slot), rows, columns, starts)


def _tree(prefix: int, starts: list[int], length: int, device: Any) -> ComparedPass:
    """On row 0 a tree: the rest of the first `prefix` tokens is the trunk, the ends of both rows are its branches. On row 1 the
    rest of that row. starts: earlier tokens of both rows."""
    trunk, ends = prefix - starts[0], length - prefix
    width = trunk + 2 * ends
    end, chain = [*range(prefix, length)], range(starts[1], starts[1] + width)
    columns = on_device([[*range(starts[0], prefix), *end, *end], [min(column, length - 1) for column in chain]], device)
    valid = on_device([[True] * width, [column < length for column in chain]], device)
    rows = on_device([[0] * (trunk + ends) + [1] * ends, [1] * width], device)
    ancestors = torch.ones((2, width, width), dtype=torch.bool, device=device).tril()
    ancestors[0, trunk + ends :, trunk : trunk + ends] = False  # the second branch does not see the first
    base = on_device(starts, device)
    slots = base[:, None] + torch.arange(width, device=device, dtype=torch.int64)
    at = Pass(columns, slots, valid, slice(0, 2), max(starts) + width, tree=Tree(base, ancestors, columns))
    return ComparedPass("in a tree", at, rows, columns, starts)
