"""Hugging Face's side of the loop: a prepared call in, Steps or an Output out."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput

from skipstone.decoding.draft import Step
from skipstone.decoding.loop import PREFILL_CHUNK, DecodingLoop, run
from skipstone.decoding.method import Method
from skipstone.decoding.output_recorder import OutputRecorder
from skipstone.decoding.request import Request
from skipstone.decoding.stats import Stats
from skipstone.hf.build_request import build_requests
from skipstone.hf.generate_call import GenerateCall, MethodLike, prepare_method
from skipstone.models.nan_checks import first_not_finite

SLOWER = 0.95  # speed-ups below this are warned about
FEW_ACCEPTED = 0.1  # acceptance rates below this are warned about
ENOUGH_TURNS = 16  # turns of the loop before a run is judged


@dataclass
class Output(GenerateDecoderOnlyOutput):
    """What `skipstone.generate` returns: Hugging Face's output with our figures.

    sequences: [B, T] int64, prompt and new tokens, padded by HF's rules. scores, logits: per new token [B, V], when asked
    for (0 for rows already finished). lossless: False only for modes that may change the text. text: the new text of every row
    as it goes on behind the prompt, when text came in. stats: `Stats` over all rows. steps: the list of `Step`, with
    record=True. engine: what ran the model, "eager", "native" or "compiled". engine_reason: why it was not the native one,
    where that was left to skipstone.
    quantize: "int8" or "int4", what the engine has quantised the weights to; None where they are as stored.
    """

    stats: Stats | None = None
    new_tokens: list[list[int]] | None = None
    text: Any = None
    method: str | None = None
    lossless: bool | None = None
    steps: list[Step] | None = None
    engine: str | None = None
    engine_reason: str | None = None
    quantize: str | None = None


class RowError(ValueError):
    """Rows for which there was no token to choose. The other rows of the call were decoded to their ends.

    errors: row -> why. output: of all rows, with what those had until then; None of `stream`.
    """

    def __init__(self, errors: dict[int, str], model: PreTrainedModel, output: Output | None = None) -> None:
        said = "; ".join(f"row {row}: {why}" for row, why in sorted(errors.items()))
        weight = first_not_finite(model)
        super().__init__(said if weight is None else f"{said}. Its weight {weight} is not finite")
        self.errors, self.output = errors, output


def admitted(method: Method, call: GenerateCall, keeper: OutputRecorder | None = None) -> tuple[DecodingLoop, list[Request]]:
    """A decoder with every row of a call admitted, and the rows' requests. All errors of the user's making are raised here."""
    runner = call.runner
    with runner.lock:
        requests = build_requests(call)
        needed = max(len(request.prompt) + request.max_new_tokens for request in requests)
        session = method.start(runner, len(requests), needed)
        chunk = call.config.prefill_chunk_size
        if chunk is not None and chunk < 1:
            raise ValueError(f"prefill_chunk_size must be at least 1, found {chunk}")
        decoder = DecodingLoop(session, chunk=chunk or PREFILL_CHUNK, recorder=keeper)
        for row, request in enumerate(requests):
            decoder.admit(row, request)
    return decoder, requests


def steps(method: MethodLike, call: GenerateCall, record: bool = False) -> Iterator[Step]:
    """The loop as an iterator of Steps. Errors are raised at the call, not at the first step; a RowError behind the last."""
    chosen = prepare_method(method, call)
    decoder, _ = admitted(chosen, call, OutputRecorder(record=True) if record else None)

    def watched() -> Iterator[Step]:
        errors: dict[int, str] = {}
        for step in run(decoder):
            errors |= step.errors
            yield step
        _warn_if_slower(chosen, decoder.stats, stacklevel=3)
        if errors:
            raise RowError(errors, call.runner.model)

    return watched()


def complete(method: MethodLike, call: GenerateCall, streamer: Any = None, record: bool = False) -> Output:
    """Decode a call to its end. streamer: a transformers streamer (one row), fed the prompt and 1-D chunks of new tokens.
    RowError where a row failed, when all others have ended."""
    if streamer is not None and call.input_ids.shape[0] > 1:
        raise ValueError(f"streamers take one row, found a batch of {call.input_ids.shape[0]}")
    kinds = record, bool(call.config.output_logits), bool(call.config.output_scores)
    keeper = OutputRecorder(*kinds) if any(kinds) else None
    chosen = prepare_method(method, call)
    decoder, requests = admitted(chosen, call, keeper)
    if streamer is not None:
        streamer.put(call.input_ids.cpu())
    kept: list[Step] = []
    errors: dict[int, str] = {}
    new: list[list[int]] = [[] for _ in requests]
    for step in run(decoder):
        errors |= step.errors
        for tokens, more in zip(new, step.tokens, strict=True):
            tokens.extend(more)
        if streamer is not None and step.tokens[0]:
            streamer.put(torch.tensor(step.tokens[0], dtype=torch.int64, device="cpu"))
        if keeper is not None:
            kept.append(step)
    if streamer is not None:
        streamer.end()
    _warn_if_slower(chosen, decoder.stats, stacklevel=4)
    output = Output(sequences=_sequences(call, new), stats=decoder.stats, new_tokens=new)  # type: ignore[arg-type]
    output.method, output.lossless, output.steps = chosen.name, chosen.lossless, kept if record else None
    runner = decoder.session.model
    output.engine, output.engine_reason, output.quantize = runner.engine.name, runner.engine_reason, runner.engine.quantize
    if keeper is not None:
        _keep_scores(output, call, kept)
    if errors:
        raise RowError(errors, call.runner.model, output)
    return output


def _keep_scores(output: Output, call: GenerateCall, kept: list[Step]) -> None:
    """Logits and scores of every new token, where they are asked for."""
    new = output.new_tokens or []
    if call.config.output_logits:
        output.logits = _per_token([step.logits for step in kept], new)
    if call.config.output_scores:
        output.scores = _per_token([step.scores for step in kept], new)


def _sequences(call: GenerateCall, new: list[list[int]]) -> Tensor:
    """[B, T] prompt as given and new tokens, finished rows filled with the pad id (HF's rule)."""
    ids = call.input_ids
    pad: Any = call.config._pad_token_tensor
    width = max(map(len, new))
    fill = 0 if pad is None else int(pad)
    rows = [tokens + [fill] * (width - len(tokens)) for tokens in new]
    return torch.cat([ids, torch.tensor(rows, dtype=ids.dtype, device=ids.device)], dim=1)


def _per_token(steps: list[list[Tensor] | None], new: list[list[int]]) -> Any:
    """Rows' [k, V] pieces -> one [B, V] per new token, 0 for rows already finished. new: the rows' new tokens."""
    width = max(map(len, new))
    columns = [torch.cat([step[row] for step in steps if step is not None]) for row in range(len(new))]
    padded = [torch.cat([c, c.new_zeros((width - len(c), c.shape[1]))]) for c in columns]
    return tuple(torch.stack(padded, 1))


_warned = False  # whether this process was told already


def _warn_if_slower(method: Method, stats: Stats, stacklevel: int) -> None:
    """Warn, with figures and once a process, where a method that a user has named cannot have paid, or hardly any of its drafts
    was accepted. Nothing is said where drafting was decided on step by step."""
    global _warned
    if _warned or stats.drafters or stats.turns < ENOUGH_TURNS or (ratio := stats.speed_up_bound) is None:
        return
    few = stats.acceptance_rate < FEW_ACCEPTED
    if ratio >= SLOWER and not few:
        return
    _warned = True
    why = f" {method.if_few_accepted}" if few and method.if_few_accepted else ""
    warnings.warn(
        f"{method.name} ran at {ratio:.2f} x the speed of plain decoding here, or less: acceptance rate "
        f"{stats.acceptance_rate:.2f}, {stats.mean_acceptance_length:.2f} tokens a step, draft "
        f"{1000 * stats.seconds_draft / stats.turns:.1f} ms + scoring {1000 * stats.seconds_score / stats.turns:.1f} ms a step."
        f"{why} method='auto' drafts only where that pays.",
        RuntimeWarning,
        stacklevel=stacklevel,
    )
