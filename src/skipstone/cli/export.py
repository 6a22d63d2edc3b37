"""`skipstone export MODEL OUT --to draft|gguf`: a draft model for other engines, made of some of the model's layers."""

from pathlib import Path

import typer

from skipstone.assets import BUNDLED, NANO
from skipstone.cli.option_groups import DTYPE, MethodOptions, check_method_values, expect_model, expect_parent_folder
from skipstone.cli.options import argument, option
from skipstone.models.gguf.pre_tokenizers import PRE_TOKENIZERS
from skipstone.utils.extras import installed

FORMATS = ("draft", "gguf")
TYPES = ("F32", "F16", "BF16")  # as in skipstone.export.gguf.write_gguf, which would import torch


def export(
    model: str = argument("A folder, a hub id, or skipstone-nano, the bundled model.", metavar="MODEL"),
    out: Path = argument("The folder to make; one that is there is refused.", metavar="OUT"),
    to: str = option("draft", "draft: a Hugging Face checkpoint; gguf: target and draft.", choices=FORMATS),
    exit_layer: int | None = option(None, "E: the first E layers draft. Default: what the model's own method says.", min=1),
    method: str | None = option(None, 'Another drafter, such as "self_speculative profile=FILE": the layers that it layers.'),
    dtype: str = DTYPE,
    weight_type: str | None = option(None, "for gguf. Default: the weights' own.", "--type", choices=TYPES),
    pre_tokenizer: str | None = option(
        None, "for gguf and a tokenizer that splits by none of them.", choices=(*PRE_TOKENIZERS,)
    ),
) -> None:
    """Write the layers that draft as a model of their own, and print the commands for other engines."""
    expect_parent_folder(out)
    if out.exists():
        raise FileExistsError(17, "there already, and an export overwrites nothing", str(out))
    if to != "gguf" and (weight_type or pre_tokenizer):
        raise ValueError(f"--{'type' if weight_type else 'pre-tokenizer'} is for --to gguf")
    chosen = MethodOptions(method).parse()
    expect_model(None if model == BUNDLED else model)
    if to == "gguf":
        installed("gguf", "GGUF files need gguf", "export")
    check_method_values(chosen)
    import torch

    from skipstone.engines.loading import load_model, load_tokenizer
    from skipstone.engines.model_runner import ModelRunner
    from skipstone.export import commands
    from skipstone.export.draft import select_draft_layers, write_draft
    from skipstone.export.gguf.vocabulary import vocabulary_of
    from skipstone.export.gguf.write_gguf import DRAFT, TARGET, stored_type, write_pair

    source = str(NANO) if model == BUNDLED else model  # other engines find the bundled model by its folder
    runner = ModelRunner(load_model(source, dtype=dtype if dtype == "auto" else getattr(torch, dtype)), "eager")
    tokenizer, layers = load_tokenizer(source), select_draft_layers(runner, chosen, exit_layer)
    if to == "draft":
        parameters = write_draft(runner, tokenizer, layers, out)
        typer.echo(f"{out}: {layers.described}, with norm and head, {parameters:,} parameters")
        lines = commands.for_draft(source, out, layers)
    else:
        kind = stored_type(runner.model, weight_type)
        vocabulary = vocabulary_of(tokenizer, runner.model, pre_tokenizer)
        write_pair(runner, vocabulary, layers, out, kind, Path(model).resolve().name)
        typer.echo(f"{out / TARGET}: {runner.depth} layers, {kind}")
        typer.echo(f"{out / DRAFT}: {layers.described}, with norm and head, {kind}")
        if not vocabulary.known:
            typer.echo(f"The files cut texts as {vocabulary.rule} does, not as the tokenizer: give prompts as token ids.")
        lines = commands.for_gguf(out, layers)
    typer.echo("Other engines take it so:")
    for engine, command in lines.items():
        typer.echo(f"  {engine}: {command}")
