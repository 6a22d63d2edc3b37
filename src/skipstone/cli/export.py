"""`skipstone export MODEL OUT --to draft|gguf`: what early exits and layer sets are worth in engines that know neither."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skipstone.cli import options
from skipstone.cli.options import option
from skipstone.utils.extras import installed

if TYPE_CHECKING:
    from skipstone.export.draft_layers import DraftLayers

BUNDLED = "skipstone-nano"  # as in skipstone.engines.loading, which would import torch
FORMATS = ("draft", "gguf")
TYPES = ("F32", "F16", "BF16")  # those of skipstone.export.gguf.file, which would import torch
RULES = ("llama-bpe", "qwen2", "smollm", "gpt-2")  # likewise, of skipstone.export.gguf.vocabulary


def _known(name: str, values: tuple[str, ...]) -> Any:
    def check(value: str | None) -> str | None:
        options.one_of(name, value, values)
        return value

    return check


def export(
    model: Annotated[str, typer.Argument(help="A folder, a hub id, or skipstone-nano, the bundled model.", metavar="MODEL")],
    out: Annotated[Path, typer.Argument(help="The folder to make; one that is there is refused.", metavar="OUT")],
    to: Annotated[
        str, typer.Option(help="draft: a Hugging Face checkpoint; gguf: target and draft.", callback=_known("--to", FORMATS))
    ] = "draft",
    exit_layer: Annotated[
        int | None, option("E: the first E layers draft. Default: what the model's own method says.", min=1)
    ] = None,
    method: Annotated[
        str | None, option('What drafts instead, such as "self_speculative profile=FILE": the layers that it leaves.')
    ] = None,
    dtype: options.Dtype = "auto",
    weight_type: Annotated[
        str | None, option(f"gguf: {', '.join(TYPES)}. Default: the weights' own.", "--type", callback=_known("--type", TYPES))
    ] = None,
    pre_tokenizer: Annotated[
        str | None,
        option(
            f"gguf: {', '.join(RULES)}; only for a tokenizer that splits texts by none of these rules.",
            callback=_known("--pre-tokenizer", RULES),
        ),
    ] = None,
    debug: options.Debug = False,
) -> None:
    """Write the layers that draft as a model of their own, and print how other engines take it."""
    options.check_folder_of(out)
    if out.exists():
        raise FileExistsError(17, "there already, and an export overwrites nothing", str(out))
    if to != "gguf" and (weight_type or pre_tokenizer):
        raise ValueError(f"--{'type' if weight_type else 'pre-tokenizer'} is for --to gguf")
    asked = options.asked_method(method)
    options.check_model(None if model == BUNDLED else model)
    if to == "gguf":
        installed("gguf", "GGUF files need gguf", "export")
    options.check_values(asked)
    from skipstone.export.draft_layers import kept

    loaded, tokenizer = _load(model, dtype)
    keeps = kept(loaded, asked, exit_layer)
    if to == "draft":
        _draft(loaded, tokenizer, keeps, model, out)
    else:
        _gguf(loaded, tokenizer, keeps, model, out, weight_type, pre_tokenizer)


def _load(name: str, dtype: str) -> tuple[Any, Any]:
    """The model, in the dtype that it is stored in by default, and its tokenizer."""
    import torch

    from skipstone.engines.loading import load_model, load_tokenizer
    from skipstone.engines.model_runner import ModelRunner

    place = _place(name)
    loaded = load_model(place, dtype=dtype if dtype == "auto" else getattr(torch, dtype))
    return ModelRunner(loaded, "eager"), load_tokenizer(place)


def _place(name: str) -> str:
    """Where a model is that any engine finds: the bundled one lies in a folder."""
    from skipstone.assets import NANO

    return str(NANO) if name == BUNDLED else name


def _draft(model: Any, tokenizer: Any, keeps: "DraftLayers", name: str, out: Path) -> None:
    from skipstone.export.commands import for_draft
    from skipstone.export.draft import write_draft

    parameters = write_draft(model, tokenizer, keeps, out)
    typer.echo(f"{out}: {keeps.described}, with norm and head, {parameters:,} parameters")
    _tell(for_draft(_place(name), out, keeps))


def _gguf(
    model: Any, tokenizer: Any, keeps: "DraftLayers", name: str, out: Path, weight_type: str | None, pre_tokenizer: str | None
) -> None:
    from skipstone.export.commands import for_gguf
    from skipstone.export.gguf.file import DRAFT, TARGET, stored_type, write_pair
    from skipstone.export.gguf.vocabulary import vocabulary_of

    kind = stored_type(model.model, weight_type)
    vocabulary = vocabulary_of(tokenizer, model.model, pre_tokenizer)
    write_pair(model, vocabulary, keeps, out, kind, Path(name).resolve().name)
    typer.echo(f"{out / TARGET}: {model.depth} layers, {kind}")
    typer.echo(f"{out / DRAFT}: {keeps.described}, with norm and head, {kind}")
    if not vocabulary.known:
        typer.echo(f"The files cut texts as {vocabulary.rule} does, not as the tokenizer: give prompts as token ids.")
    _tell(for_gguf(out, keeps))


def _tell(commands: Mapping[str, str]) -> None:
    """A line an engine."""
    typer.echo("Other engines take it so:")
    for engine, command in commands.items():
        typer.echo(f"  {engine}: {command}")
