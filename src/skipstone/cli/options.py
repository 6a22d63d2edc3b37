"""The options that several verbs have, and what they stand for: a model, a method, a quiet or a talkative run."""

import json
import os
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from skipstone.cli import terminal
from skipstone.decoding import method_text
from skipstone.decoding.method_text import Known, MethodMissing
from skipstone.utils.settings_files import did_you_mean

CONFIG = "config.json"  # what every folder and repository of a model has
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
    one_of("--dtype", dtype, DTYPES)
    return dtype


Dtype = Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}; auto is the checkpoint's.", callback=_known_dtype)]


QUANTIZED = ("none", "int8", "int4")  # those of skipstone.models, too


def known_quantize(quantize: str) -> str:
    """What weights are quantised to. ValueError for any other text."""
    one_of("--quantize", quantize, QUANTIZED)
    return quantize


def known_engine(engine: str) -> str:
    """The name of an engine. ValueError for any other text."""
    one_of("--engine", engine, ENGINES)
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
    one_of("--kv-dtype", kv_dtype, KV_DTYPES)
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


def _read_generation_config(source: str) -> dict[str, Any] | None:
    """--generation-config as fields, None for the model's own."""
    if source == "auto":
        return None
    if source in NO_CONFIG:
        return {}
    path = Path(source).expanduser() / "generation_config.json"
    if not path.is_file():
        raise ValueError(f"--generation-config must be auto, none or a folder with a generation_config.json, found {source!r}")
    from skipstone.models.generation_config import read_generation_config

    return read_generation_config(path)


def _read_overrides(text: str | None) -> dict[str, Any]:
    """--override-generation-config as fields."""
    from skipstone.models.generation_config import misspelt_fields, parse_generation_config

    if text is None:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a misspelt field is an error here
        found = parse_generation_config(text, "--override-generation-config")
    for name, meant in misspelt_fields(found):
        raise ValueError(f"--override-generation-config: there is no field {name!r}; did you mean {meant}?")
    return found


NO_CONFIG = ("none", "vllm")  # the second is what vLLM calls it
GenerationConfig = Annotated[
    Any,
    grouped(
        "Decoding",
        "auto takes the model's own generation_config.json, none ignores it, a folder has another one.",
        "--generation-config",
        parser=str,
        callback=_read_generation_config,
        metavar="TEXT",
    ),
]
OverrideGenerationConfig = Annotated[
    Any,
    grouped(
        "Decoding",
        'Fields of the generation config to change, as JSON: {"temperature": 0.7}; null unsets one.',
        "--override-generation-config",
        parser=str,
        callback=_read_overrides,
        metavar="JSON",
    ),
]


def check_model(name: str | None) -> None:
    """OSError where there is no model of this name: the mistake is told before torch is imported."""
    if name is None:
        return
    from skipstone.models.fetching import fetch, hub_name
    from skipstone.models.gguf import expect_gguf

    path = Path(name).expanduser()
    if path.is_file():
        expect_gguf(path)
    elif path.exists():
        if not (path / CONFIG).exists():
            file = next(path.glob("*.gguf"), None)
            meant = "" if file is None else f"; did you mean {file}?"
            raise FileNotFoundError(2, f"it has no {CONFIG}; a model is such a folder, a .gguf file or a hub id{meant}", name)
    elif hub_name(name) is None:
        raise FileNotFoundError(2, "no such folder, and not a hub id either", name)
    else:
        fetch(name, CONFIG)


def one_of(name: str, value: str | None, values: tuple[str, ...]) -> None:
    """ValueError for a value of an option that is not among the known ones."""
    if value is not None and value not in values:
        raise ValueError(f"{name} must be one of {', '.join(values)}, found {value!r}{did_you_mean(value, values)}")


def check_readable(*files: Path | None) -> None:
    """OSError for a file that cannot be read."""
    for file in files:
        if file is not None:
            file.open("rb").close()


def check_prompts(*files: Path | None) -> None:
    """OSError or ValueError for what is no file of JSON lines."""
    check_readable(*files)
    for file in files:
        if file is not None and file.suffix != ".jsonl":
            raise ValueError(f"--prompts takes JSON lines, a file that ends in .jsonl, found {file}")


def check_writable(*files: Path | None) -> None:
    """OSError for a file that cannot be written."""
    check_folder_of(*files)
    for file in files:
        if file is not None and file.is_dir():
            raise IsADirectoryError(21, "a folder; name a file", str(file))
        if file is not None and not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
            raise PermissionError(13, "no permission to write it", str(file))


def load(
    model: str | None,
    dtype: str,
    device: str,
    engine: str = "auto",
    quantize: str = "none",
    generation_config: dict[str, Any] | None = None,
    override_generation_config: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """The model, and its tokenizer. generation_config, override_generation_config: as in `replace_defaults`."""
    import torch

    from skipstone.engines import loading

    wanted = dtype if dtype == "auto" else getattr(torch, dtype)
    elsewhere = any(options.get(name) is not None for name in ("device_map", "tp_plan"))
    place = "cpu" if elsewhere and device == "auto" else loading.usable(device)
    defaults = loading.generation_defaults(model, generation_config, override_generation_config or {})
    options["generation_config"] = defaults
    found, tokenizer = loading.load(model, dtype=wanted, device=place, engine=engine, quantize=quantize, **options)
    if generation_config is not None or override_generation_config:
        from skipstone.hf.generation_defaults import replace_defaults

        replace_defaults(found, generation_config, override_generation_config or {})
    return found, tokenizer


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


def texts_or_bundled(texts: list[str] | None, files: list[Path] | None = None) -> list[str]:
    """The texts of --prompt or of the files of --prompts, or every fifth bundled one. ValueError where both are given, and for
    an empty text."""
    from skipstone.lab.tasks.data_sets import named

    if texts and files:
        raise ValueError("give either --prompt or --prompts, found both")
    check_prompts(*(files or ()))
    if not texts:
        taken = [(named(str(file)), 1) for file in files or ()] or [(named("self"), 5)]
        texts = [task.ask(row)[0] for task, every in taken for row in task.records(None)[::every]]
    if "" in texts:
        raise ValueError("a prompt is empty: there is no token to start from")
    return texts


def ids_of(texts: list[str], tokenizer: Any) -> list[Any]:
    """The token ids of texts, [T] int64 each."""
    import torch

    from skipstone.hf.api import token_ids

    return [torch.tensor(token_ids(text, tokenizer), dtype=torch.int64, device="cpu") for text in texts]


def asked_method(text: str | None, config: str | None = None) -> Any:
    """What --method and --speculative-config ask for. ValueError for names and types that are wrong whatever the model is:
    torch is not imported for them."""
    from skipstone.cli.method_table import known_methods

    if config is None:
        if text is not None:
            check_method(text, known_methods())
        return text
    merged = _merged(text, config, known_methods())
    with suppress(MethodMissing):
        method_text.check_names(merged, known_methods())
    return merged


def checked_method(model: str | None, text: str | None, config: str | None = None) -> Any:
    """As `asked_method`, before the model is loaded: the model is looked for as well, and then values are checked."""
    asked = asked_method(text, config)
    check_model(model)
    check_values(asked)
    return asked


def check_method(text: str, known: Known, labels: tuple[str, ...] = (), several: bool = False) -> None:
    """ValueError where a method's text has names or types that are wrong whatever the model is."""
    with suppress(MethodMissing):  # the model's own may be meant
        method_text.check_names(method_text.parse(text, known, None, labels, several), known, labels)


def check_values(asked: Any) -> None:
    """ValueError for values of settings that are wrong whatever the model is, before it is loaded."""
    if asked is None:
        return
    from skipstone.methods import resolve

    with warnings.catch_warnings(), suppress(MethodMissing):
        warnings.simplefilter("ignore")  # it is resolved again with the model's own method, and warns then
        resolve(asked)


def _merged(text: str | None, config: str, known: Known) -> dict[str, Any]:
    """--speculative-config, with what --method says besides. Where they contradict one another, neither wins silently."""
    try:
        merged = json.loads(config)
    except json.JSONDecodeError as error:
        raise ValueError(f"--speculative-config is not JSON ({error}), found {config!r}") from None
    if not isinstance(merged, dict):
        raise ValueError(f'--speculative-config must be an object such as {{"method": "layerskip"}}, found {config!r}')
    own = merged.get("method")
    said = {} if text is None else method_text.parse(text, known, own if isinstance(own, str) and own in known else None)
    for key, value in said.items():
        if merged.setdefault(key, value) != value:
            name = "" if key == "method" else f"{key}="
            raise ValueError(f"--method says {name}{value!r}, --speculative-config says {merged[key]!r}: give one of them")
    return merged
