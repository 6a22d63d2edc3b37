"""`skipstone generate`: continue a prompt. The text goes to stdout as it is made, everything else to stderr."""

import secrets
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer

from skipstone.cli import options, terminal
from skipstone.cli.options import grouped

SAMPLING = ("top_k", "top_p", "min_p")  # options that mean nothing without a temperature
WITHOUT_TEXT = {  # options that --json excludes, and why
    "color": "--color marks text, --json prints none",
    "stats": "--json holds what --stats prints",
    "explain": "--explain prints a table, --json prints none",
}


def generate(
    model: options.Model = None,
    prompt: Annotated[str | None, grouped("Prompt", "The text to continue.")] = None,
    prompt_file: Annotated[Path | None, grouped("Prompt", "A file to continue (UTF-8).")] = None,
    prompt_tokens: Annotated[int | None, grouped("Prompt", "Keep the prompt's last N tokens only.", min=1)] = None,
    chat: Annotated[bool, grouped("Prompt", "Wrap the prompt in the model's chat template.", "--chat")] = False,
    method: options.MethodText = None,
    speculative_config: options.MethodConfig = None,
    max_new_tokens: Annotated[int, grouped("Decoding", "Most tokens to add.", min=1)] = 128,
    temperature: Annotated[float, grouped("Decoding", "0 is greedy.", min=0.0)] = 0.0,
    top_k: Annotated[int | None, grouped("Decoding", "Default: the model's own, or transformers' 50.", min=0)] = None,
    top_p: Annotated[float | None, grouped("Decoding", "Default: the model's own, or 1.", min=0.0, max=1.0)] = None,
    min_p: Annotated[float | None, grouped("Decoding", "Default: the model's own, or 0.", min=0.0, max=1.0)] = None,
    seed: Annotated[int | None, grouped("Decoding", "Of random draws. Default: a new one, named by --stats.", min=0)] = None,
    stop: Annotated[list[str] | None, grouped("Decoding", "Stop after this text (may be given several times).")] = None,
    ignore_eos: Annotated[bool, grouped("Decoding", "Go on after the end-of-text token.", "--ignore-eos")] = False,
    generation_config: options.GenerationConfig = "auto",
    override_generation_config: options.OverrideGenerationConfig = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    engine: options.Engine = "auto",
    quantize: options.Quantize = "none",
    kv_dtype: options.KvDtype = None,
    device_map: options.Map = None,
    offload_folder: options.OffloadFolder = None,
    tp_plan: options.TpPlan = None,
    trust_remote_code: options.TrustRemoteCode = False,
    compare: Annotated[bool, grouped("Output", "Decode plainly too, in turn; compare speed and text.", "--compare")] = False,
    repeat: Annotated[int, grouped("Output", "With --compare: runs of each.", min=1)] = 1,
    as_json: Annotated[bool, grouped("Output", "Print one JSON document instead of the text.", "--json")] = False,
    stats: Annotated[bool, grouped("Output", "Print figures of the run on stderr.", "--stats")] = False,
    explain: Annotated[bool, grouped("Output", "Print why every step did what it did on stderr.", "--explain")] = False,
    color: Annotated[bool | None, grouped("Output", "Mark accepted drafts. Default: on terminals.", show_default=False)] = None,
    debug: options.Debug = False,
) -> None:
    """Continue a prompt: --prompt, --prompt-file, or standard input without its last newline. The text goes to stdout,
    all else to stderr."""
    flags = SimpleNamespace(**locals())
    _refuse_contradictions(flags)
    asked = options.asked_method(method, speculative_config)
    options.check_model(model)
    text = _prompt(prompt, prompt_file)
    options.check_values(asked)
    with terminal.first_speaks() if tp_plan else nullcontext():
        _run(flags, asked, text)


def _run(flags: Any, asked: Any, text: str) -> None:
    """Load, decode, show."""
    names = ("engine", "quantize", "kv_dtype", "device_map", "offload_folder", "tp_plan", "trust_remote_code")
    names += ("generation_config", "override_generation_config")
    setup = {name: getattr(flags, name) for name in names}
    loaded, tokenizer = options.load(flags.model, flags.dtype, flags.device, **setup, keep_weights=False)
    from skipstone.cli.runs import compared, decode
    from skipstone.cli.showing import TokenPrinter, document, tell
    from skipstone.engines.model_runner import ModelRunner
    from skipstone.hf.api import resolve_for
    from skipstone.hf.generation_defaults import expect_usable_defaults

    if flags.tp_plan is None:
        expect_usable_defaults(ModelRunner(loaded), tokenizer)
    chosen, job = resolve_for(loaded, asked), _job(flags, loaded, tokenizer, text)
    painter = None if flags.as_json else TokenPrinter(job, flags.color)
    show = painter and painter.show
    run, comparison = compared(job, chosen, flags.repeat, show) if flags.compare else (decode(job, chosen, show), None)
    if painter is None:
        terminal.print_json(document(flags.model, job, chosen, run, comparison))
    else:
        painter.end(more=flags.stats or flags.explain or flags.compare)
        tell(job, chosen, run, comparison, flags.stats, flags.explain)
    _leave()
    if run.interrupted:
        raise typer.Exit(terminal.INTERRUPTED)


def _leave() -> None:
    """Part from the other processes, where there are any."""
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _refuse_contradictions(flags: Any) -> None:
    """ValueError for options that would be ignored, or that exclude one another."""
    if flags.prompt is not None and flags.prompt_file is not None:
        raise ValueError("give --prompt or --prompt-file, not both")
    if flags.chat and flags.prompt_tokens is not None:
        raise ValueError("--prompt-tokens would cut the chat template off: it does not go with --chat")
    if flags.tp_plan is not None and flags.prompt is None and flags.prompt_file is None:
        raise ValueError("the processes of --tp cannot share standard input: pass --prompt or --prompt-file")
    if flags.repeat > 1 and not flags.compare:
        raise ValueError("--repeat counts the runs of --compare: give both")
    for name, why in WITHOUT_TEXT.items():
        if flags.as_json and getattr(flags, name):
            raise ValueError(f"{why}: give one of them")
    if "" in (flags.stop or []):
        raise ValueError("--stop takes a text, found an empty one")
    for name in (*SAMPLING, "seed"):
        if flags.temperature == 0 and getattr(flags, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} has no effect at temperature 0: pass --temperature too")


def _prompt(text: str | None, file: Path | None) -> str:
    """The prompt's text. Piped text loses the newline at its end, which `echo` adds. ValueError for an empty file or pipe; an
    empty --prompt is refused later, if the model has no token that begins a text."""
    if text is not None:
        data, source = text.encode(errors="surrogateescape"), "--prompt"
    elif file is not None:
        data, source = file.read_bytes(), str(file)
    elif sys.stdin is None or sys.stdin.isatty():
        raise ValueError("no prompt: pass --prompt or --prompt-file, or pipe a text in")
    else:
        data, source = sys.stdin.buffer.read(), "standard input"
        data = data.removesuffix(b"\n").removesuffix(b"\r") if data.endswith(b"\r\n") else data.removesuffix(b"\n")
    if text is None and not data:
        raise ValueError(f"the prompt is empty: {source} holds no text")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not UTF-8 (byte {error.start} is {data[error.start]:#04x})") from None


def _job(flags: Any, model: Any, tokenizer: Any, text: str) -> Any:
    """The prompt as token ids, and the decoding options as fields of GenerationConfig: what is not given is the model's own."""
    import torch

    from skipstone.cli.runs import RunInput
    from skipstone.engines.loading import bos_prefix
    from skipstone.engines.model_runner import ModelRunner
    from skipstone.hf.api import token_ids
    from skipstone.hf.requests import generation_options

    ids = token_ids([{"role": "user", "content": text}] if flags.chat else text, tokenizer)
    if not ids:
        raise ValueError("the prompt is empty: there is no token to start from")
    if flags.prompt_tokens is not None:
        first = bos_prefix(tokenizer)
        ids = [*first, *ids[len(first) :][-flags.prompt_tokens :]]
    names = ("max_new_tokens", "temperature", *SAMPLING, "stop", "ignore_eos")
    fields = generation_options(**{name: getattr(flags, name) for name in names})
    runner = ModelRunner(model)
    seed = runner.ranks.agreed_whole(secrets.randbits(32)) if flags.seed is None else flags.seed
    return RunInput(model, tokenizer, torch.tensor([ids], dtype=torch.int64, device=runner.device), fields, seed)
