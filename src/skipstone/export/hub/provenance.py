"""Collects the records of an upload: its base model, training and measurements.

Records lie in the upload's own files, and for a finished run in the run's folder, one level up. Missing records are not
guessed."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from skipstone.engines.loading import BUNDLED, EXPORT
from skipstone.methods import resolve
from skipstone.methods.adadecode.heads import HeadsCard
from skipstone.methods.drafting.layer_sets import LayerSetProfile
from skipstone.models.fetching import hub_name
from skipstone.models.generation_config import OWN_FIELD
from skipstone.train import checkpoint
from skipstone.train.layerskip.metrics import EXIT_FIGURE
from skipstone.utils.files import read_lines
from skipstone.utils.settings_files import first_fault

Table = Sequence[Sequence[str]]
"""Rows of cells, the titles first."""
METRICS = "metrics.jsonl"  # file in the folder of a LayerSkip run
DATA = "data.json"  # file of a trained model: the account of its data
TEXT = '"def add(a, b):"'
UNRECORDED = "not recorded"


class SourceCounts(BaseModel):
    """kept: documents without duplicates. train: their "tokens". rows: of the training order."""

    kept: int
    train: dict[str, int]
    rows: int
    epochs: float


class DataReport(BaseModel):
    """The fields of a model's `data.json` that its card repeats. tokens, sha256: of the training order."""

    tokens: int
    sha256: str
    sources: dict[str, SourceCounts]


class ExportOrigin(BaseModel):
    """A draft's `export.json`: the model that it is a part of, and which part."""

    base: str | None
    revision: str | None
    fingerprint: str
    layers: list[int]
    depth: int


Form = TypeVar("Form", bound=BaseModel)


@dataclass(frozen=True)
class Provenance:
    """summary: a sentence. base: a hub id with or without a revision, a folder's name, or the bundled model's; None if it is
    unknown. facts: name -> value, except training's. tables: heading -> table. method: how to decode with it; {repo} stands for
    the repository. loads: the argument of `skipstone.load`, likewise; "" for the bundled model."""

    summary: str
    method: str
    loads: str
    base: str | None = None
    revision: str | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    tables: Mapping[str, Table] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    writes_text: bool = False


def of_heads(card: HeadsCard, folder: Path) -> Provenance:
    """The records of a folder of exit heads and of its run."""
    layers = ", ".join(map(str, card.layers))
    facts = {"fingerprint of the model": card.model, "kind": card.kind, "layers": layers}
    manifest = checkpoint.fingerprint_of(checkpoint.latest(folder.parent))
    if manifest.get("model") == card.model and "answers" in manifest:
        facts["hash of the answers that they learnt from"] = str(manifest["answers"])
    titles = ("after layer", "KL", "first choice agrees", "sure", "right where sure")
    names = ("divergence", "agreement", "sure", "right")
    known = [(layer, figures) for layer, figures in card.metrics.items() if isinstance(figures, Mapping)]
    rows = [(layer, *(_change(figures, name) for name in names)) for layer, figures in known]
    recipe = {name: value for name, value in card.training.items() if name not in ("seconds", "lm_head", "model_revision")}
    return Provenance(
        f"Exit heads for AdaDecode (arXiv 2506.03700) after layers {layers}: light heads at middle layers that predict early.",
        "adadecode heads={repo}",
        loads_of(card.name),
        base=card.name or None,
        revision=card.training.get("model_revision"),
        facts=facts,
        recipe=recipe,
        tables={"Held-out answers, before training -> after": [titles, *rows]} if rows else {},
        tags=("adadecode", "early-exit"),
    )


def of_checkpoint(folder: Path, drafts: bool) -> Provenance:
    """The records of a model's folder and of its run. drafts: whether it drafts for another model."""
    config, own = (json_in(folder / name) for name in ("config.json", "generation_config.json"))
    data, origin = _read(folder / DATA, DataReport), _read(folder / EXPORT, ExportOrigin)
    kind, layers = config.get("model_type"), config.get("num_hidden_layers")
    facts = {"model type": f"{kind}, {layers} layers", "dtype": str(config.get("dtype"))}
    tables: dict[str, Table] = {}
    base = revision = None
    manifest: dict[str, Any] = {}
    if own.get(OWN_FIELD) is not None:
        facts["decodes by default with"] = _spell_method(own[OWN_FIELD], folder)
    if origin is not None:
        base, revision = origin.base, origin.revision
        facts["layers of the base model"] = f"{', '.join(map(str, origin.layers))} of {origin.depth}, counted from 0"
        facts["fingerprint of the base model"] = origin.fingerprint
    if data is not None:
        facts |= {"tokens of the training order": f"{data.tokens:,}", "SHA-256 of the training order": data.sha256}
        counts = [(name, one.kept, one.train["tokens"], one.rows, one.epochs) for name, one in data.sources.items()]
        rows = [(name, *(f"{count:,}" for count in whole), f"{epochs:.2f}") for name, *whole, epochs in counts]
        tables["Data"] = [("source", "documents", "their tokens", "rows", "epochs"), *rows]
        found = checkpoint.fingerprint_of(checkpoint.latest(folder.parent))
        if found.get("data") == data.sha256:  # else the folder above is another run, or none
            manifest = found
            tables |= _exit_table(folder.parent / METRICS)
    if "pretrained" in manifest:
        base = _public_name(manifest["pretrained"])
    recipe = _training(manifest)
    common: dict[str, Any] = {"base": base, "revision": revision, "facts": facts, "recipe": recipe, "tables": tables}
    common["writes_text"] = True
    if drafts:
        said = f"A {kind} model of {layers} layers that drafts for a larger one."
        return Provenance(said, "speculative draft_model={repo}", loads_of(base or ""), tags=("draft-model",), **common)
    made = "trained by skipstone" if data is not None else "with a decoding method of its own"
    tags = _method_tags(own.get(OWN_FIELD))
    return Provenance(f"A {kind} model of {layers} layers, {made}.", "", "{repo}", tags=tags, **common)


def of_profile(profile: LayerSetProfile) -> Provenance:
    """The records of a layer set."""
    facts = {"fingerprint of the model": profile.model}
    facts |= {name: ", ".join(map(str, getattr(profile, name))) or "none" for name in ("attention", "mlp")}
    return Provenance(
        "A layer set for self-speculative decoding (arXiv 2309.08168): which sublayers drafting leaves out, found by "
        "`skipstone search`.",
        "self_speculative profile={repo}",
        loads_of(profile.name),
        base=profile.name or None,
        facts=facts,
        tables={"Measured by the search": _pairs(profile.about)} if profile.about else {},
        tags=("self-speculative-decoding",),
    )


def of_tuned(held: Mapping[str, Any]) -> Provenance:
    """The records of a file of `skipstone tune`."""
    return Provenance(
        "What `auto` has learnt of a model on a kind of machine: costs, calibrations and rates, kept by `skipstone tune`.",
        "auto profile={repo}",
        "MODEL",
        facts={"fingerprint of the model" if name == "model" else name: str(value) for name, value in held["key"].items()},
        tables={"Measured while it was tuned": _pairs(held["about"])} if held["about"] else {},
        tags=("speculative-decoding",),
    )


def loads_of(name: str) -> str:
    """The argument of `skipstone.load` for a model of that name: a hub id, "" for the bundled one, MODEL if only the reader
    knows it."""
    if name == BUNDLED:
        return ""
    meant = hub_name(name)
    return name if meant is not None and "/" in meant.repo else "MODEL"


def _spell_method(own: Any, folder: Path) -> str:
    """A model's own method as text. ValueError if it is none."""
    try:
        return resolve(None, own).spelled
    except ValueError as error:
        raise ValueError(f"{folder}: generation_config.{OWN_FIELD}: {error}") from error


def _method_tags(method: Any) -> tuple[str, ...]:
    """Tags of a model on the hub. method: its own."""
    named = method.get("method") if isinstance(method, Mapping) else None
    return ("speculative-decoding", *([] if named is None else [str(named)]))


def _public_name(name: str) -> str:
    """A model's name for other readers: a hub id, or the name of a folder without its path."""
    return Path(name).name if Path(name).is_absolute() or Path(name).exists() else name


def json_in(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} if there is no file. ValueError if it is damaged."""
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged, it holds no JSON object: {error}") from error


def _training(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a LayerSkip run that have a value."""
    names = ("recipe", "steps", "seed", "layers", "lora", "teacher", "distillation_vocabulary")
    found = {name: manifest[name] for name in names if name in manifest}
    return found | {name: value for name, value in manifest.get("training", {}).items() if value not in (None, {}, "")}


def _read(path: Path, form: type[Form]) -> Form | None:
    """A record; None if there is no file. ValueError for a damaged one and for one that skipstone did not write."""
    if not path.is_file():
        return None
    try:
        return form.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ValueError(f"{path} is damaged, or not skipstone's: {first_fault(error)}") from error


def _exit_table(path: Path) -> dict[str, Table]:
    """A row per exit: perplexity and agreement with the last layer on every held-out set, from the last evaluation."""
    found: dict[tuple[str, str, int], float] = {}
    for entry in read_lines(path) if path.is_file() else ():
        for name, value in entry.items():
            if match := EXIT_FIGURE.fullmatch(name):
                found[match[1] or "held out", match[2], int(match[3])] = value  # a later line counts
    columns = sorted({(source, kind) for source, kind, _ in found}, key=lambda one: (one[0], one[1] != "perplexity"))
    titles = ("after layer", *(f"{source}: {kind}" for source, kind in columns))
    layers = sorted({layer for *_, layer in found})
    rows = [(str(layer), *(_figure(found.get((*column, layer))) for column in columns)) for layer in layers]
    return {"Held-out text, at the end of training": [titles, *rows]} if rows else {}


def _pairs(about: Mapping[str, Any]) -> Table:
    return [("what", "value"), *((name.replace("_", " "), _figure(value)) for name, value in _flat(about))]


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _change(figures: Mapping[str, Any], name: str) -> str:
    """A figure of a head before training and after it."""
    earlier = figures.get("before")
    before = earlier.get(name) if isinstance(earlier, Mapping) else None
    return _figure(figures.get(name)) if before is None else f"{_figure(before)} -> {_figure(figures.get(name))}"


def _figure(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
