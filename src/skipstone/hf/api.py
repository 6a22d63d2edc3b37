"""`generate` and `stream`: text or tensors in, text, tensors or Steps out."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from skipstone.decoding.draft import Step
from skipstone.decoding.loop import PREFILL_CHUNK, DecodingLoop, run
from skipstone.decoding.method import Method
from skipstone.decoding.output_recorder import OutputRecorder
from skipstone.decoding.stats import Stats
from skipstone.engines.host_transfer import left_padded
from skipstone.hf.build_request import build_requests
from skipstone.hf.detokenizer import detokenize
from skipstone.hf.generate_call import GenerateCall, MethodLike, Seed, prepare_call, prepare_method, token_tensor
from skipstone.models.nan_checks import first_not_finite
from skipstone.utils.extras import installed
from skipstone.utils.setup_times import REQUEST, collect_setup_seconds, setup_work

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from skipstone.hf.output import Output

Inputs = Tensor | np.ndarray | str | Sequence[Any] | Mapping[str, Any]
SLOWER = 0.95  # lower speed-ups cause a warning
FEW_ACCEPTED = 0.1  # lower acceptance rates cause a warning
ENOUGH_TURNS = 16  # minimum number of steps before a warning


class RowError(ValueError):
    """Some rows had no token to choose. The other rows of the call are complete.

    errors: row -> reason. output: of all rows, with the tokens of failed rows so far; None for `stream`.
    """

    def __init__(self, errors: dict[int, str], model: Any, output: "Output | None" = None) -> None:
        message = "; ".join(f"row {row}: {reason}" for row, reason in sorted(errors.items()))
        weight = first_not_finite(model)
        super().__init__(message if weight is None else f"{message}. Its weight {weight} is not finite")
        self.errors, self.output = errors, output


def generate(
    model: "PreTrainedModel",
    inputs: Inputs,
    method: MethodLike = None,
    *,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    streamer: Any = None,
    seed: Seed = None,
    record: bool = False,
    engine: str | None = None,
    **options: Any,
) -> "Output":
    """Generate with a decoding method.

    inputs: ids [B, T] of any integer dtype, as a tensor or a numpy array (left-padded, with attention_mask=); a text or a list
    of texts; a chat (list of {"role", "content"}) or a list of chats. Texts and chats need `tokenizer`. method: a Method, a
    name with settings ("layerskip exit_layer=4"), a mapping {"method": name, ...}, or None for the model's default. seed: of
    the first row, from which other rows derive theirs, or a list with one per row. record: keep figures of every token in
    `output.steps`. engine: "auto", "eager", "native" or "compiled" for this call; None for the value of `load` or `enable`,
    else the environment variable SKIPSTONE_ENGINE, else "auto". options: `GenerationConfig` fields and keyword arguments of
    `model.generate` with the meaning in transformers; also quantize, kv_dtype and compute_dtype as in `skipstone.load`, with
    the same defaults as `engine` (environment variable SKIPSTONE_KV).

    Returns an `Output`: sequences [B, T_total] int64, new_tokens per row, stats, and text if the inputs were text.
    ValueError, before any work, for anything unsupported. RowError, a ValueError, if some rows had no token to choose; its
    `output` has the texts of all rows.
    """
    with collect_setup_seconds(), setup_work(REQUEST):
        ids, options = _encode(inputs, tokenizer, options)
        call = prepare_call(model, ids, tokenizer, seed, options, engine)

    def read(new: list[list[int]]) -> Any:
        if tokenizer is None or isinstance(inputs, (Tensor, np.ndarray, Mapping)):
            return None
        texts = [detokenize(tokenizer, tokens, ids.tolist()) for ids, tokens in zip(call.prompts, new, strict=True)]
        return texts[0] if _single(inputs) and len(texts) == 1 else texts

    return complete(method, call, streamer, record, read)


def stream(
    model: "PreTrainedModel",
    inputs: Inputs,
    method: MethodLike = None,
    *,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    seed: Seed = None,
    record: bool = False,
    engine: str | None = None,
    **options: Any,
) -> Iterator[Step]:
    """Like `generate`, one `Step` at a time. Closing the iterator early is safe.

    Errors are raised at the call, except RowError, which comes after the last step."""
    with collect_setup_seconds(), setup_work(REQUEST):
        ids, options = _encode(inputs, tokenizer, options)
        call = prepare_call(model, ids, tokenizer, seed, options, engine)
        chosen = prepare_method(method, call)
        decoder = admitted(chosen, call, OutputRecorder(record=True) if record else None)

    def watched() -> Iterator[Step]:
        errors: dict[int, str] = {}
        for step in run(decoder):
            errors |= step.errors
            yield step
        _warn_if_slower(chosen, decoder.stats, stacklevel=3)
        if errors:
            raise RowError(errors, call.runner.model)

    return watched()


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
    """Whether the inputs are one text or one chat."""
    return isinstance(inputs, str) or (isinstance(inputs, Sequence) and bool(inputs) and isinstance(inputs[0], Mapping))


def token_ids(prompt: Any, tokenizer: Any) -> list[int]:
    """The ids of a text, or of a chat in the tokenizer's template with the assistant's turn opened."""
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    if not isinstance(prompt, Sequence) or not all(isinstance(turn, Mapping) for turn in prompt):
        raise ValueError(f"a prompt is a text or a chat (a list of {{'role', 'content'}}), found {type(prompt).__name__}")
    return tokenizer(chat_text(prompt, tokenizer), add_special_tokens=False)["input_ids"]


def bos_prefix(tokenizer: Any) -> list[int]:
    """[bos] if the tokenizer begins texts with it, else []."""
    ids: Any = tokenizer("a")["input_ids"]
    return list(ids[:1]) if ids[0] == tokenizer.bos_token_id else []


def chat_text(messages: Sequence[Any], tokenizer: Any, tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """The text of a chat in the tokenizer's template, with the assistant's turn opened. tools: in transformers' format."""
    if tokenizer.chat_template is None:
        raise ValueError("this tokenizer has no chat template; pass the prompt as text")
    installed("jinja2", "a chat template needs jinja2", "serve")
    offered = {"tools": list(tools)} if tools else {}
    try:
        text = str(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False, **offered))
        text.encode()  # tokenizers reject unpaired surrogates
        return text
    except Exception as error:  # a template is a program that comes with the model, so it may raise anything
        kind = "" if type(error).__name__ == "TemplateError" else f"{type(error).__name__}: "
        reason = str(error).strip() or "no reason was given"
        raise ValueError(f"the model's chat template refuses the messages: {kind}{reason}") from error


def admitted(method: Method, call: GenerateCall, recorder: OutputRecorder | None = None) -> DecodingLoop:
    """A decoder with every row of a call admitted. All user errors are raised here."""
    runner = call.runner
    with runner.lock:
        requests = build_requests(call)
        needed = max(len(request.prompt) + request.max_new_tokens for request in requests)
        session = method.start(runner, len(requests), needed)
        chunk = call.config.prefill_chunk_size
        if chunk is not None and chunk < 1:
            raise ValueError(f"prefill_chunk_size must be at least 1, found {chunk}")
        decoder = DecodingLoop(session, chunk=chunk or PREFILL_CHUNK, recorder=recorder, setup=call.setup)
        for row, request in enumerate(requests):
            decoder.admit(row, request)
    return decoder


def complete(
    method: MethodLike,
    call: GenerateCall,
    streamer: Any = None,
    record: bool = False,
    read: Callable[[list[list[int]]], Any] = lambda _: None,
) -> "Output":
    """Decode a call to its end. RowError if rows failed, when all others are complete.

    streamer: a transformers streamer (for one row); it gets the prompt and 1-D chunks of new tokens. read: new tokens of all
    rows -> `Output.text`."""
    if streamer is not None and call.input_ids.shape[0] > 1:
        raise ValueError(f"streamers take one row, found a batch of {call.input_ids.shape[0]}")
    kinds = record, bool(call.config.output_logits), bool(call.config.output_scores)
    with collect_setup_seconds(call.setup), setup_work(REQUEST):
        chosen = prepare_method(method, call)
        decoder = admitted(chosen, call, OutputRecorder(*kinds) if any(kinds) else None)
    if streamer is not None:
        streamer.put(call.input_ids.cpu())
    recorded: list[Step] = []
    errors: dict[int, str] = {}
    for step in run(decoder):
        errors |= step.errors
        if streamer is not None and step.tokens[0]:
            streamer.put(torch.tensor(step.tokens[0], dtype=torch.int64, device="cpu"))
        if any(kinds):
            recorded.append(step)
    if streamer is not None:
        streamer.end()
    _warn_if_slower(chosen, decoder.stats, stacklevel=4)
    from skipstone.hf.output import Output

    runner, new = decoder.session.model, [row.tokens for row in decoder.rows if row is not None]
    output = Output(sequences=_sequences(call, new), stats=decoder.stats, new_tokens=new, text=read(new))  # type: ignore[arg-type]
    output.method, output.lossless, output.steps = chosen.name, chosen.lossless, recorded if record else None
    output.engine, output.engine_reason, output.quantize = runner.engine.name, runner.engine_reason, runner.engine.quantize
    for name in ("logits", "scores"):
        if getattr(call.config, f"output_{name}"):
            setattr(output, name, _per_token([getattr(step, name) for step in recorded], new))
    if errors:
        raise RowError(errors, call.runner.model, output)
    return output


def _sequences(call: GenerateCall, new: list[list[int]]) -> Tensor:
    """[B, T] int64: prompts as given and new tokens, padded with the pad id as in transformers."""
    ids = call.input_ids
    pad: Any = call.config._pad_token_tensor
    width = max(map(len, new))
    fill = 0 if pad is None else int(pad)
    rows = [tokens + [fill] * (width - len(tokens)) for tokens in new]
    return torch.cat([ids, torch.tensor(rows, dtype=ids.dtype, device=ids.device)], dim=1)


def _per_token(steps: list[list[Tensor] | None], new: list[list[int]]) -> Any:
    """Pieces [k, V] per step and row -> one [B, V] per new token, 0 for finished rows. new: the rows' new tokens."""
    width = max(map(len, new))
    columns = [torch.cat([step[row] for step in steps if step is not None]) for row in range(len(new))]
    padded = [torch.cat([c, c.new_zeros((width - len(c), c.shape[1]))]) for c in columns]
    return tuple(torch.stack(padded, 1))


_warned = False  # whether this process has shown the warning


def _warn_if_slower(method: Method, stats: Stats, stacklevel: int) -> None:
    """Warn, once a process, if a method was slower than plain decoding or had few accepted drafts. `auto` causes no warning."""
    global _warned
    if _warned or stats.drafters or stats.turns < ENOUGH_TURNS or (bounds := stats.speed_up_bounds) is None:
        return
    few_accepted = stats.acceptance_rate < FEW_ACCEPTED
    if bounds[1] >= SLOWER and not few_accepted:
        return
    _warned = True
    why = f" {method.if_few_accepted}" if few_accepted and method.if_few_accepted else ""
    warnings.warn(
        f"{method.name} ran at {bounds[0]:.2f} x the speed of plain decoding here, or less, and at {bounds[1]:.2f} x without "
        f"prefill and set-up ({stats.seconds_setup:.2f} s): acceptance rate "
        f"{stats.acceptance_rate:.2f}, {stats.mean_acceptance_length:.2f} tokens a step, draft "
        f"{1000 * stats.seconds_draft / stats.turns:.1f} ms + scoring {1000 * stats.seconds_score / stats.turns:.1f} ms a step."
        f"{why} method='auto' drafts only where that pays.",
        RuntimeWarning,
        stacklevel=stacklevel,
    )
