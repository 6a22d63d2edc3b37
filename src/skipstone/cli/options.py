"""The options that several verbs have, and what they stand for: a model, a method, a quiet or a talkative run."""

import json
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from skipstone.cli import terminal

DTYPES = ("auto", "float32", "bfloat16", "float16")
ENGINES = ("auto", "eager", "native", "compiled")  # those of skipstone.models, which would import torch
KV_DTYPES = ("float32", "bfloat16")  # likewise


def option(text: str, *names: str, **more: Any) -> Any:
    """An option with its help. Its default is shown only where the help says so."""
    return typer.Option(*names, help=text, show_default=False, **more)


def grouped(panel: str, text: str, *names: str, **more: Any) -> Any:
    """An option with its help, under a heading."""
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


def _set_up(ctx: typer.Context, debug: bool) -> bool:
    """Before a verb runs: whether tracebacks are shown, and whether libraries keep quiet until it has ended."""
    ctx.obj["debug"] = debug
    if not debug:
        ctx.with_resource(terminal.quiet())
    return debug


Model = Annotated[str | None, typer.Argument(help="A folder or a hub id. Default: the bundled model.", metavar="MODEL")]


def _known_dtype(dtype: str) -> str:
    if dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, found {dtype!r}")
    return dtype


Dtype = Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}; auto is the checkpoint's.", callback=_known_dtype)]


QUANTIZED = ("none", "int8", "int4")  # those of skipstone.models, too


def known_quantize(quantize: str) -> str:
    """What weights are quantised to. ValueError for any other text."""
    if quantize not in QUANTIZED:
        raise ValueError(f"--quantize must be one of {', '.join(QUANTIZED)}, found {quantize!r}")
    return quantize


def known_engine(engine: str) -> str:
    """The name of an engine. ValueError for any other text."""
    if engine not in ENGINES:
        raise ValueError(f"--engine must be one of {', '.join(ENGINES)}, found {engine!r}")
    return engine


Engine = Annotated[
    str, typer.Option(help=f"One of {', '.join(ENGINES)}; auto is native where it can run the model.", callback=known_engine)
]
Quantize = Annotated[
    str,
    typer.Option(
        help=f"One of {', '.join(QUANTIZED)}: what the native engine quantises the weights to.", callback=known_quantize
    ),
]


def known_kv(kv_dtype: str | None) -> str | None:
    """The name of a dtype of keys and values, or None. ValueError for any other text."""
    if kv_dtype is not None and kv_dtype not in KV_DTYPES:
        raise ValueError(f"--kv-dtype must be one of {', '.join(KV_DTYPES)}, found {kv_dtype!r}")
    return kv_dtype


KvDtype = Annotated[
    str | None,
    typer.Option(
        help=f"What keys and values are kept in: {' or '.join(KV_DTYPES)}. Default: SKIPSTONE_KV, or float32.",
        callback=known_kv,
        show_default=False,
    ),
]
Device = Annotated[str, typer.Option(help="auto is cuda where there is one, else cpu.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run the checkpoint's own code.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]
Debug = Annotated[bool, typer.Option("--debug", callback=_set_up, help="Show tracebacks.", hidden=True)]
MethodText = Annotated[
    str | None,
    grouped("Method", '"layerskip exit_layer=4", or JSON; `skipstone methods` lists all. Default: the model\'s own.'),
]
MethodConfig = Annotated[
    str | None,
    grouped(
        "Method", 'The method as JSON, as in vLLM: {"method": "layerskip", "exit_layer": 4}. It must not contradict --method.'
    ),
]


def check_folder_of(*files: Path | None) -> None:
    """FileNotFoundError where a file that is to be written would lie in no folder."""
    for file in files:
        if file is not None and not file.absolute().parent.is_dir():
            raise FileNotFoundError(2, "no such folder", str(file.parent))


def load(
    model: str | None, dtype: str, device: str, engine: str = "auto", quantize: str = "none", **options: Any
) -> tuple[Any, Any]:
    """The model, and its tokenizer."""
    import torch

    from skipstone import loading

    wanted = dtype if dtype == "auto" else getattr(torch, dtype)
    elsewhere = any(options.get(name) is not None for name in ("device_map", "tp_plan"))
    place = "cpu" if elsewhere and device == "auto" else loading.usable(device)
    return loading.load(model, dtype=wanted, device=place, engine=engine, quantize=quantize, **options)


def _read_map(text: str | None) -> Any:
    """--device-map as transformers takes it: a word, or a JSON object."""
    if text is None or not text.lstrip().startswith("{"):
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--device-map is neither a word nor JSON ({error}), found {text!r}") from None


Map = Annotated[
    Any,
    grouped(
        "Devices",
        'Layers on several devices or offloaded: "auto", or JSON of modules and devices, as transformers takes it.',
        "--device-map",
        parser=str,
        callback=_read_map,
        metavar="TEXT",
    ),
]
OffloadFolder = Annotated[
    Path | None, grouped("Devices", "Where weights go that --device-map sends to disk.", "--offload-folder")
]
TpPlan = Annotated[
    str | None,
    grouped(
        "Devices", '"auto": share the weights among the processes of `torchrun --nproc-per-node N -m skipstone ...`.', "--tp"
    ),
]

MaxNumSeqs = Annotated[int, grouped("Scheduling", "Texts that are written at a time.", min=1, max=1024)]
MaxModelLen = Annotated[
    int | None, grouped("Scheduling", "Most tokens of a text, prompt included. Default: the model's, 4096 at most.", min=2)
]
RayAddress = Annotated[
    str | None, grouped("Ray", "Of a running cluster, HOST:PORT or ray://HOST:PORT. Default: a new one, on this machine.")
]


def texts_or_bundled(texts: list[str] | None, tokenizer: Any, files: list[Path] | None = None) -> tuple[list[str], list[Any]]:
    """The texts of --prompt or of the files of --prompts, or every fifth bundled one; and their token ids, [T] int64 each.
    ValueError where both are given."""
    import torch

    from skipstone.api import token_ids
    from skipstone.tasks.sets import named

    if texts and files:
        raise ValueError("give either --prompt or --prompts, found both")
    if not texts:
        taken = [(named(str(file)), 1) for file in files or ()] or [(named("self"), 5)]
        texts = [task.ask(row)[0] for task, every in taken for row in task.records(None)[::every]]
    return texts, [torch.tensor(token_ids(text, tokenizer), dtype=torch.int64, device="cpu") for text in texts]


def asked_method(text: str | None, config: str | None) -> Any:
    """What --method and --speculative-config ask for. ValueError for what is wrong whatever the model is."""
    if text is None and config is None:
        return None  # the model's own one: methods are not imported, which takes seconds
    from skipstone.methods import MethodMissing, resolve

    asked = text if config is None else _merged(text, config)
    with warnings.catch_warnings(), suppress(MethodMissing):
        warnings.simplefilter("ignore")  # it is resolved again with the model's own method, and warns then
        resolve(asked)
    return asked


def _merged(text: str | None, config: str) -> dict[str, Any]:
    """--speculative-config, with what --method says besides. Where they contradict one another, neither wins silently."""
    from skipstone.methods import METHODS, parse

    try:
        merged = json.loads(config)
    except json.JSONDecodeError as error:
        raise ValueError(f"--speculative-config is not JSON ({error}), found {config!r}") from None
    if not isinstance(merged, dict):
        raise ValueError(f'--speculative-config must be an object such as {{"method": "layerskip"}}, found {config!r}')
    own = merged.get("method")
    said = {} if text is None else parse(text, own=METHODS.get(own) if isinstance(own, str) else None)
    for key, value in said.items():
        if merged.setdefault(key, value) != value:
            name = "" if key == "method" else f"{key}="
            raise ValueError(f"--method says {name}{value!r}, --speculative-config says {merged[key]!r}: give one of them")
    return merged
