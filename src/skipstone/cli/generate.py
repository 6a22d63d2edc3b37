"""`skipstone generate`: continue a prompt. The text goes to stdout while it is decoded, everything else to stderr."""

import secrets
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from skipstone.cli import option_groups, terminal
from skipstone.cli.option_groups import DEVICE_MAP, GenerationModelOptions, MethodOptions, SamplingOptions
from skipstone.cli.options import OptionGroup, option
from skipstone.cli.terminal import INTERRUPTED

if TYPE_CHECKING:
    from skipstone.cli.runs import Run, RunComparison, RunInput
    from skipstone.decoding.method import Method

EXCLUDED_BY_JSON = {
    "color": "--color marks text, --json prints none",
    "stats": "--json holds what --stats prints",
    "explain": "--explain prints a table, --json prints none",
}


@dataclass(frozen=True)
class PromptSource(OptionGroup, panel="Prompt"):
    """Where the prompt comes from. ValueError for sources that exclude each other."""

    prompt: str | None = option(None, "The text to continue.")
    prompt_file: Path | None = option(None, "A file to continue (UTF-8).")
    prompt_tokens: int | None = option(None, "Keep the prompt's last N tokens only.", min=1)
    chat: bool = option(False, "Wrap the prompt in the model's chat template.", "--chat")

    def __post_init__(self) -> None:
        if self.prompt is not None and self.prompt_file is not None:
            raise ValueError("give --prompt or --prompt-file, not both")
        if self.chat and self.prompt_tokens is not None:
            raise ValueError("--prompt-tokens would cut the chat template off: it does not go with --chat")

    @property
    def is_standard_input(self) -> bool:
        return self.prompt is None and self.prompt_file is None

    def read(self) -> str:
        """The prompt's text. Piped text loses the newline at its end, which `echo` adds.

        ValueError for an empty file or pipe. An empty --prompt is refused later, if the model has no token that begins a text.
        """
        if self.prompt is not None:
            data, source = self.prompt.encode(errors="surrogateescape"), "--prompt"
        elif self.prompt_file is not None:
            data, source = self.prompt_file.read_bytes(), str(self.prompt_file)
        elif sys.stdin is None or sys.stdin.isatty():
            raise ValueError("no prompt: pass --prompt or --prompt-file, or pipe a text in")
        else:
            data, source = sys.stdin.buffer.read(), "standard input"
            data = data.removesuffix(b"\n").removesuffix(b"\r") if data.endswith(b"\r\n") else data.removesuffix(b"\n")
        if self.prompt is None and not data:
            raise ValueError(f"the prompt is empty: {source} holds no text")
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{source} is not UTF-8 (byte {error.start} is {data[error.start]:#04x})") from None

    def encode(self, text: str, tokenizer: Any) -> list[int]:
        """The token ids of the prompt's text. ValueError if there are none."""
        from skipstone.hf.api import bos_prefix, token_ids

        ids = token_ids([{"role": "user", "content": text}] if self.chat else text, tokenizer)
        if not ids:
            raise ValueError("the prompt is empty: there is no token to start from")
        if self.prompt_tokens is None:
            return ids
        bos = bos_prefix(tokenizer)
        return [*bos, *ids[len(bos) :][-self.prompt_tokens :]]


@dataclass(frozen=True)
class GenerationOptions(SamplingOptions, panel="Decoding"):
    """How tokens are chosen, and where the text ends. Names as in `decoding.request.generation_options`, seed apart."""

    top_k: int | None = option(None, "Default: the model's own, or transformers' 50.", min=0)
    min_p: float | None = option(None, "Default: the model's own, or 0.", min=0.0, max=1.0)
    max_new_tokens: int = option(128, "Most tokens to add.", min=1)
    seed: int | None = option(None, "Of random draws. Default: a new one, named by --stats.", min=0)
    stop: list[str] | None = option(None, "Stop after this text (may be given several times).")
    ignore_eos: bool = option(False, "Go on after the end-of-text token.", "--ignore-eos")

    def __post_init__(self) -> None:
        super().__post_init__()
        if "" in (self.stop or []):
            raise ValueError("--stop takes a text, found an empty one")


@dataclass(frozen=True)
class PlacedModelOptions(GenerationModelOptions, panel="Devices"):
    """A model that may lie on several devices."""

    device_map: Any = DEVICE_MAP
    offload_folder: Path | None = option(None, "Where weights go that --device-map sends to disk.")
    tp_plan: str | None = option(None, '"auto": the processes of `torchrun ... -m skipstone` share the weights.', "--tp")

    def load(self, **arguments: Any) -> tuple[Any, Any]:
        """As `GenerationModelOptions.load`, on the devices that the options name."""
        places = {"device_map": self.device_map, "offload_folder": self.offload_folder, "tp_plan": self.tp_plan}
        return super().load(**places, **arguments)


@dataclass(frozen=True)
class OutputOptions(OptionGroup, panel="Output"):
    """What is printed. ValueError for options that would be ignored."""

    compare: bool = option(False, "Decode plainly as well; compare speed and text.", "--compare")
    repeat: int = option(1, "With --compare: runs of each.", min=1)
    as_json: bool = option(False, "Print one JSON document instead of the text.", "--json")
    stats: bool = option(False, "Print figures of the run on stderr.", "--stats")
    explain: bool = option(False, "Print why every step did what it did on stderr.", "--explain")
    color: bool | None = option(None, "Mark accepted drafts. Default: on terminals.")

    def __post_init__(self) -> None:
        if self.repeat > 1 and not self.compare:
            raise ValueError("--repeat counts the runs of --compare: give both")
        for name, reason in EXCLUDED_BY_JSON.items():
            if self.as_json and getattr(self, name):
                raise ValueError(f"{reason}: give one of them")


def generate(
    source: PromptSource, method: MethodOptions, decoding: GenerationOptions, model: PlacedModelOptions, output: OutputOptions
) -> None:
    """Continue a prompt: --prompt, --prompt-file, or standard input without its last newline. The text goes to stdout,
    all else to stderr."""
    if model.tp_plan is not None and source.is_standard_input:
        raise ValueError("the processes of --tp cannot share standard input: pass --prompt or --prompt-file")
    chosen = method.parse()
    option_groups.expect_model(model.model)
    text = source.read()
    option_groups.check_method_values(chosen)
    with terminal.only_first_process_prints() if model.tp_plan else nullcontext():
        _load_and_decode(source, text, chosen, decoding, model, output)


def _load_and_decode(
    source: PromptSource, text: str, chosen: Any, decoding: GenerationOptions, model: PlacedModelOptions, output: OutputOptions
) -> None:
    loaded, tokenizer = model.load()
    import torch

    from skipstone.cli.runs import RunInput, TokenPrinter, compare_with_plain, decode, run_document
    from skipstone.decoding.method_states import save_learned
    from skipstone.engines.choose_engine import copies_of
    from skipstone.engines.model_runner import ModelRunner
    from skipstone.hf.generate_call import resolve_for
    from skipstone.hf.generation_defaults import expect_usable_defaults

    runner = ModelRunner(loaded)
    if model.tp_plan is None:
        expect_usable_defaults(runner, tokenizer)
    resolved = resolve_for(loaded, chosen)
    ids = torch.tensor([source.encode(text, tokenizer)], dtype=torch.int64, device=runner.device)
    seed = runner.ranks.agreed_whole(secrets.randbits(32)) if decoding.seed is None else decoding.seed
    job = RunInput(loaded, tokenizer, ids, decoding.generation_options(), seed)
    printer = None if output.as_json else TokenPrinter(job, output.color)
    show, comparison = printer and printer.show, None
    if output.compare:
        run, comparison = compare_with_plain(job, resolved, output.repeat, show)
    else:
        run = decode(job, resolved, show)
    if printer is None:
        terminal.print_json(run_document(model.model, job, resolved, run, comparison))
    else:
        printer.end(more=output.stats or output.explain or output.compare)
        _print_figures(job, resolved, run, comparison, output)
    if copies_of(loaded):
        save_learned(runner)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if run.interrupted:
        raise typer.Exit(INTERRUPTED)


def _print_figures(
    job: "RunInput", method: "Method", run: "Run", comparison: "RunComparison | None", output: OutputOptions
) -> None:
    """Figures and decisions, if they are asked for, and the comparison's table, on stderr."""
    from rich.text import Text

    from skipstone.cli.runs import decision_table, figure_lines
    from skipstone.utils.processor_watch import busy_warning

    console = terminal.console(stderr=True)

    def print_lines(*lines: str | None) -> None:
        for line in lines:
            if line is not None:
                console.print(Text(line), soft_wrap=True)

    if output.stats:
        print_lines(*figure_lines(job, method, run))
    if output.explain:
        has_choice = bool(run.stats.drafters)
        console.print(decision_table(run.steps) if has_choice else f"{method.name} decides nothing: there is no choice")
    if comparison is not None:
        console.print(comparison.table())
        print_lines(comparison.first_sentence(), busy_warning(comparison.waited_share), comparison.verdict())
