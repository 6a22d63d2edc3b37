"""From flags to a job: what contradicts itself, the prompt, the model, the method."""

from __future__ import annotations

import secrets
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from skipstone.api import resolve_for, token_ids
from skipstone.cli import flags
from skipstone.cli.decoding import Job
from skipstone.cli.options import DTYPES, Options
from skipstone.decoding.method import OWN_FIELD, Method
from skipstone.loading import bos_prefix, load, usable
from skipstone.methods import METHODS, resolve

Given = Mapping[str, str | None]
SAMPLING = ("top_k", "top_p", "min_p")


def prepare(options: Options, given: Given) -> tuple[Job, Method]:
    """Everything that can be refused before the model is loaded, is. ValueError, or OSError for files that are not there."""
    _check(options)
    wanted = flags.wish(options.method, given, options.speculative_config)
    if "method" in wanted:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is resolved again, with the model's defaults
            resolve(wanted)
    place = usable(options.device)
    text = _prompt(options)
    dtype = options.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    model, tokenizer = load(options.model, dtype=dtype, device=place, trust_remote_code=options.trust_remote_code)
    config: Any = model.generation_config
    if "method" not in wanted:
        default = getattr(config, OWN_FIELD, None)
        if not default:
            raise ValueError(f"no method: pass --method, one of {', '.join(METHODS)} (this model names no default)")
        wanted = flags.wish(resolve(None, default).name, given, options.speculative_config)
    method = resolve_for(model, wanted)
    ids = token_ids([{"role": "user", "content": text}] if options.chat else text, tokenizer)
    if not ids:
        raise ValueError("the prompt is empty: there is no token to start from")
    if options.ignore_eos:
        config.eos_token_id = None
    if options.prompt_tokens is not None:
        first = bos_prefix(tokenizer)
        ids = [*first, *ids[len(first) :][-options.prompt_tokens :]]
    kept = torch.tensor([ids], device=model.device)
    seed = secrets.randbits(32) if options.seed is None else options.seed
    return Job(model, tokenizer, kept, _decoding(options), seed), method


def _check(options: Options) -> None:
    """ValueError for flags that would be ignored, or that exclude one another."""
    if options.prompt is not None and options.prompt_file is not None:
        raise ValueError("give --prompt or --prompt-file, not both")
    if options.chat and options.prompt_tokens is not None:
        raise ValueError("--prompt-tokens would cut the chat template off: it does not go with --chat")
    if options.repeat > 1 and not options.compare:
        raise ValueError("--repeat counts the runs of --compare: give both")
    if options.json and options.color:
        raise ValueError("--color marks text, --json prints none: give one of them")
    if options.dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, found {options.dtype!r}")
    if options.json and options.stats:
        raise ValueError("--json holds what --stats prints: give one of them")
    if "" in (options.stop or []):
        raise ValueError("--stop takes a text, found an empty one")
    if options.temperature == 0 and (useless := [name for name in SAMPLING if getattr(options, name) is not None]):
        raise ValueError(f"{flags.flag(useless[0])} has no effect at temperature 0: pass --temperature too")
    if options.temperature == 0 and options.seed is not None:
        raise ValueError("--seed has no effect at temperature 0: pass --temperature too")


def _prompt(options: Options) -> str:
    """The prompt's text, exactly as it was given. An empty one is refused later, where it has no token either."""
    if options.prompt is not None:
        return _utf8(options.prompt.encode(errors="surrogateescape"), "--prompt")
    if options.prompt_file is not None:
        return _utf8(options.prompt_file.read_bytes(), str(options.prompt_file))
    if sys.stdin is None or sys.stdin.isatty():
        raise ValueError("no prompt: pass --prompt or --prompt-file, or pipe a text in")
    return _utf8(sys.stdin.buffer.read(), "standard input")


def _utf8(data: bytes, source: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not UTF-8 (byte {error.start} is {data[error.start]:#04x})") from None


def _decoding(options: Options) -> dict[str, Any]:
    """The flags as `GenerationConfig` fields. What is not given is left to the model's own generation config."""
    chosen: dict[str, Any] = {"max_new_tokens": options.max_new_tokens, "do_sample": options.temperature > 0}
    if options.temperature > 0:
        given = {name: getattr(options, name) for name in SAMPLING}
        chosen |= {"temperature": options.temperature} | {name: value for name, value in given.items() if value is not None}
    if options.stop:
        chosen["stop_strings"] = options.stop
    return chosen
