"""Text or tensors in, text or tensors out."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skipstone.decoding.draft import Step
from skipstone.extras import installed
from skipstone.hf import generation
from skipstone.hf.call import MethodLike, prepare_call, resolve_for, token_tensor
from skipstone.hf.generation import Output
from skipstone.models.host import left_padded

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
    ValueError for anything that is not supported, before any work is done.
    """
    chosen = resolve_for(model, method, options.get("generation_config"))
    ids, options = _encode(inputs, tokenizer, options)
    call = prepare_call(model, ids, tokenizer, seed, options, engine)
    output = generation.complete(chosen, call, streamer, record)
    if not isinstance(inputs, (Tensor, np.ndarray, Mapping)) and tokenizer is not None:
        texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in output.new_tokens or []]
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
    """Like `generate`, one `Step` at a time. Errors are raised at the call; closing the iterator early is safe."""
    chosen = resolve_for(model, method, options.get("generation_config"))
    ids, options = _encode(inputs, tokenizer, options)
    return generation.steps(chosen, prepare_call(model, ids, tokenizer, seed, options, engine), record)


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
    fill = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    ids, mask = left_padded(rows, fill)
    return ids, {"attention_mask": mask, **options}


def _single(inputs: Any) -> bool:
    """One text, or one chat."""
    return isinstance(inputs, str) or (isinstance(inputs, Sequence) and bool(inputs) and isinstance(inputs[0], Mapping))


def token_ids(prompt: Any, tokenizer: Any, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
    """The ids of a text, or of a chat through the tokenizer's template with the assistant's turn opened. tools: that the chat
    may call, as transformers' templates take them."""
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    if not isinstance(prompt, Sequence) or not all(isinstance(turn, Mapping) for turn in prompt):
        raise ValueError(f"a prompt is a text or a chat (a list of {{'role', 'content'}}), found {type(prompt).__name__}")
    if tokenizer.chat_template is None:
        raise ValueError("this tokenizer has no chat template; pass the prompt as text")
    jinja2 = installed("jinja2", "a chat template needs jinja2", "serve")
    offered = {"tools": list(tools)} if tools else {}
    try:
        encoded = tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, return_dict=True, **offered)
    except jinja2.TemplateError as error:  # such as a template that knows no system's messages
        raise ValueError(f"the model's chat template refuses the messages: {error}") from None
    return list(encoded["input_ids"])


class Detokenizer:
    """Tokens to text, piece by piece, holding back bytes of a character that is not complete yet. special: whether special
    tokens are text, too."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, special: bool = False) -> None:
        self.tokenizer, self.special = tokenizer, special
        self.tokens: list[int] = []
        self.shown = 0
        self.anchor = 0

    def add(self, token: int) -> str:
        """The text that one more token completes; may be empty."""
        self.tokens.append(token)
        before, after = self._text(self.anchor, self.shown), self._text(self.anchor, None)
        if after.endswith("�"):
            return ""
        self.anchor, self.shown = self.shown, len(self.tokens)
        return after[len(before) :]

    def rest(self) -> str:
        """What is still held back at the end."""
        return self._text(self.anchor, None)[len(self._text(self.anchor, self.shown)) :]

    def _text(self, start: int, stop: int | None) -> str:
        return str(self.tokenizer.decode(self.tokens[start:stop], skip_special_tokens=not self.special))
