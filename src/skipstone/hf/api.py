"""`generate` and `stream`: text or tensors in, text, tensors or Steps out."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.utils import GenerateDecoderOnlyOutput

from skipstone.decoding.draft import Step
from skipstone.decoding.loop import PREFILL_CHUNK, DecodingLoop, run
from skipstone.decoding.method import Method
from skipstone.decoding.output_recorder import OutputRecorder
from skipstone.decoding.request import Request
from skipstone.decoding.stats import Stats
from skipstone.engines.host_transfer import left_padded
from skipstone.hf.build_request import build_requests
from skipstone.hf.detokenizer import detokenize
from skipstone.hf.generate_call import GenerateCall, MethodLike, prepare_call, prepare_method, token_tensor
from skipstone.models.nan_checks import first_not_finite
from skipstone.utils.extras import installed

Inputs = Tensor | np.ndarray | str | Sequence[Any] | Mapping[str, Any]
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


def generate(
    model: PreTrainedModel,
    inputs: Inputs,
    method: MethodLike = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    streamer: Any = None,
    seed: int | list[int] | None = None,
    record: bool = False,
    engine: str | None = None,
    **options: Any,
) -> Output:
    """Generate with a decoding method.

    inputs: ids [B, T] of any integer dtype, a tensor or a numpy array (left-padded, with attention_mask=), a text, a list of
    texts, a chat (list of {"role", "content"}), or a list of chats; text needs `tokenizer`. method: a Method, a name with
    settings ("layerskip exit_layer=4"), a mapping {"method": name, ...}, or None for the model's default. seed: of the first
    row, from which every further row gets its own; or a list with one per row. record: keep per-token figures in
    `output.steps`. engine: "auto", "eager", "native" or "compiled", for this call; None takes what `load` or `enable` was told,
    then the environment variable SKIPSTONE_ENGINE, then "auto". options: `GenerationConfig` fields and keyword arguments of
    `model.generate`, with HF's meaning; and quantize and kv_dtype, as in `skipstone.load`, found like `engine` (the environment
    variable is SKIPSTONE_KV).

    Returns an `Output`: sequences [B, T_total] int64, new_tokens per row, stats, and text when text came in.
    ValueError for anything that is not supported, before any work is done. RowError, a ValueError, where there was no token to
    choose for some rows: its `output` has the texts of all.
    """
    ids, options = _encode(inputs, tokenizer, options)
    call = prepare_call(model, ids, tokenizer, seed, options, engine)
    try:
        return _with_text(complete(method, call, streamer, record), call, inputs, tokenizer)
    except RowError as error:
        if error.output is not None:
            _with_text(error.output, call, inputs, tokenizer)
        raise


def _with_text(output: Output, call: GenerateCall, inputs: Inputs, tokenizer: Any) -> Output:
    """The output with the text of every row, where text came in."""
    if not isinstance(inputs, (Tensor, np.ndarray, Mapping)) and tokenizer is not None:
        rows = zip(call.prompts, output.new_tokens or [], strict=True)
        texts = [detokenize(tokenizer, tokens, prompt.tolist()) for prompt, tokens in rows]
        output.text = texts[0] if _single(inputs) and len(texts) == 1 else texts
    return output


def stream(
    model: PreTrainedModel,
    inputs: Inputs,
    method: MethodLike = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    seed: int | list[int] | None = None,
    record: bool = False,
    engine: str | None = None,
    **options: Any,
) -> Iterator[Step]:
    """Like `generate`, one `Step` at a time. Errors are raised at the call, and a RowError behind the last step; closing the
    iterator early is safe."""
    ids, options = _encode(inputs, tokenizer, options)
    return steps(method, prepare_call(model, ids, tokenizer, seed, options, engine), record)


def _encode(inputs: Inputs, tokenizer: Any, options: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """(ids [B, T], options with the attention mask)."""
    if isinstance(inputs, Mapping):
        ids = token_tensor(inputs.get("input_ids"))
        if not isinstance(ids, Tensor):
            raise ValueError(f'inputs["input_ids"] must be a tensor (return_tensors="pt"), found {type(ids).__name__}')
        return ids, {**{key: value for key, value in inputs.items() if key != "input_ids"}, **options}
    if isinstance(inputs, np.ndarray):
        inputs = token_tensor(inputs) if inputs.dtype.kind in "iu" else inputs.tolist()
    if isinstance(inputs, Tensor):
        return (inputs[None] if inputs.ndim == 1 else inputs), options
    if not isinstance(inputs, (str, Sequence)):
        raise ValueError(f"inputs must be token ids [batch, length], a text, a chat or a list of these, found {inputs!r}")
    if tokenizer is None:
        raise ValueError("text needs a tokenizer: pass tokenizer=, or a tensor of token ids instead of text")
    texts = [inputs] if _single(inputs) else list(inputs)
    if not texts:
        raise ValueError("the list of prompts is empty")
    rows = [token_ids(text, tokenizer) for text in texts]
    if empty := [index for index, row in enumerate(rows) if not row]:
        raise ValueError(f"prompt {empty[0]} is empty: there is no token to start from")
    pad = tokenizer.pad_token_id
    ids, mask = left_padded(rows, (tokenizer.eos_token_id or 0) if pad is None else pad)
    return ids, {"attention_mask": mask, **options}


def _single(inputs: Any) -> bool:
    """One text, or one chat."""
    return isinstance(inputs, str) or (isinstance(inputs, Sequence) and bool(inputs) and isinstance(inputs[0], Mapping))


def token_ids(prompt: Any, tokenizer: Any) -> list[int]:
    """The ids of a text, or of a chat through the tokenizer's template with the assistant's turn opened."""
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    if not isinstance(prompt, Sequence) or not all(isinstance(turn, Mapping) for turn in prompt):
        raise ValueError(f"a prompt is a text or a chat (a list of {{'role', 'content'}}), found {type(prompt).__name__}")
    return tokenizer(chat_text(prompt, tokenizer), add_special_tokens=False)["input_ids"]


def chat_text(messages: Sequence[Any], tokenizer: Any, tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """What the tokenizer's template makes of a chat, with the assistant's turn opened. tools: that the chat may call, as
    transformers' templates take them."""
    if tokenizer.chat_template is None:
        raise ValueError("this tokenizer has no chat template; pass the prompt as text")
    installed("jinja2", "a chat template needs jinja2", "serve")
    offered = {"tools": list(tools)} if tools else {}
    try:
        text = str(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False, **offered))
        text.encode()  # no tokenizer takes an unpaired surrogate
        return text
    except Exception as error:  # a template is a program of the model's: it may refuse the messages, or fail in any way
        raise ValueError(f"the model's chat template refuses the messages: {_said(error)}") from error


def _said(error: Exception) -> str:
    """What a chat template said, or how it failed."""
    said = str(error).strip() or "no reason was given"
    return said if type(error).__name__ == "TemplateError" else f"{type(error).__name__}: {said}"


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
