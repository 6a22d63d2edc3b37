"""Text or tensors in, text or tensors out."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skipstone.decoding.draft import Step
from skipstone.engines.host_transfer import left_padded
from skipstone.hf import generation
from skipstone.hf.detokenizer import detokenize
from skipstone.hf.generate_call import GenerateCall, MethodLike, prepare_call, token_tensor
from skipstone.hf.generation import Output, RowError
from skipstone.utils.extras import installed

Inputs = Tensor | np.ndarray | str | Sequence[Any] | Mapping[str, Any]


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
        return _with_text(generation.complete(method, call, streamer, record), call, inputs, tokenizer)
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
    return generation.steps(method, prepare_call(model, ids, tokenizer, seed, options, engine), record)


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
