"""The flags of `skipstone generate` that belong to no method."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

DTYPES = ("auto", "float32", "bfloat16", "float16")


def _option(text: str, panel: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


@dataclasses.dataclass(frozen=True)
class Options:
    """Each flag, its type, its default and its help, once; those of the methods derive from their dataclasses."""

    model: Annotated[
        str | None,
        typer.Argument(help="A folder or a hub id. Default: the bundled model.", metavar="MODEL"),
    ] = None
    prompt: Annotated[str | None, _option("The text to continue.", "Prompt")] = None
    prompt_file: Annotated[Path | None, _option("A file to continue (UTF-8).", "Prompt")] = None
    prompt_tokens: Annotated[int | None, _option("Keep the prompt's last N tokens only.", "Prompt", min=1)] = None
    chat: Annotated[bool, _option("Wrap the prompt in the model's chat template.", "Prompt", "--chat")] = False
    method: Annotated[str | None, _option("See `skipstone methods`. Default: the model's own.", "Method")] = None
    speculative_config: Annotated[
        str | None,
        _option(
            'The method as JSON, as in vLLM: {"method": "layerskip", "exit_layer": 4}. Flags must not contradict it.', "Method"
        ),
    ] = None
    max_new_tokens: Annotated[int, _option("Most tokens to add.", "Decoding", min=1)] = 128
    temperature: Annotated[float, _option("0 is greedy.", "Decoding", min=0.0)] = 0.0
    top_k: Annotated[int | None, _option("Default: the model's own, or transformers' 50.", "Decoding", min=0)] = None
    top_p: Annotated[float | None, _option("Default: the model's own, or 1.", "Decoding", min=0.0, max=1.0)] = None
    min_p: Annotated[float | None, _option("Default: the model's own, or 0.", "Decoding", min=0.0, max=1.0)] = None
    seed: Annotated[int | None, _option("Of the random draws. Default: a new one, named by --stats.", "Decoding", min=0)] = None
    stop: Annotated[list[str] | None, _option("Stop after this text (may be given several times).", "Decoding")] = None
    ignore_eos: Annotated[bool, _option("Go on after the end-of-text token.", "Decoding", "--ignore-eos")] = False
    dtype: Annotated[str, _option(f"One of {', '.join(DTYPES)}; auto is the checkpoint's.", "Model")] = "auto"
    device: Annotated[str, _option("auto is cuda where there is one, else cpu.", "Model")] = "auto"
    trust_remote_code: Annotated[bool, _option("Run the checkpoint's own code.", "Model", "--trust-remote-code")] = False
    compare: Annotated[bool, _option("Decode plainly too, in turn, and compare speed and text.", "Output", "--compare")] = False
    repeat: Annotated[int, _option("With --compare: runs of each.", "Output", min=1)] = 1
    json: Annotated[bool, _option("Print one JSON document instead of the text.", "Output", "--json")] = False
    stats: Annotated[bool, _option("Print figures of the run on stderr.", "Output", "--stats")] = False
    color: Annotated[
        bool | None, _option("Mark accepted drafts. Default: where stdout is a terminal.", "Output", show_default=False)
    ] = None
    debug: Annotated[bool, _option("Show tracebacks and the libraries' own messages.", "Output", "--debug")] = False
