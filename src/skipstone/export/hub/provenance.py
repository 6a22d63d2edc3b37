"""What was recorded of a thing that goes to the hub: what it is made of or for, how it was trained, what it was measured at.

Records lie in the thing's own files, and for a finished run in the run's folder, which is the one above. What nobody recorded
is not guessed.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
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


class PartCounts(BaseModel):
    """Of a part of a source."""

    tokens: int


class SourceCounts(BaseModel):
    """kept: documents without duplicates. rows: of the training order."""

    kept: int
    train: PartCounts
    rows: int
    epochs: float


class DataReport(BaseModel):
    """What a model's `data.json` says that its card repeats. tokens, sha256: of the training order."""

    tokens: int
    sha256: str
    sources: dict[str, SourceCounts]


class ExportOrigin(BaseModel):
    """What an export's `export.json` says: the model that it is a part of, and which part."""

    base: str | None
    revision: str | None
    fingerprint: str
    layers: list[int]
    depth: int


Form = TypeVar("Form", bound=BaseModel)


@dataclass(frozen=True)
class Provenance:
    """summary: a sentence. base: a hub id with or without a revision, a folder's name, or the bundled model's; None where it is
    not known. facts: name -> value, what is not of training. tables: heading -> table. method: how to decode with it, with
    {repo} in the place of the repository. loads: what `skipstone.load` is told, likewise; "" for the bundled model."""

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
    """What a folder of exit heads says of itself, and the run that it lies in."""
    layers = ", ".join(map(str, card.layers))
    facts = {"fingerprint of the model": card.model, "kind": card.kind, "layers": layers}
    manifest = _manifest(folder.parent)
    if manifest.get("model") == card.model and "answers" in manifest:
        facts["hash of the answers that they learnt from"] = str(manifest["answers"])
    titles = ("after layer", "KL", "first choice agrees", "sure", "right where sure")
    rows = [
        (layer, *(_change(one, name) for name in ("divergence", "agreement", "sure", "right")))
        for layer, one in card.metrics.items()
        if isinstance(one, Mapping)
    ]
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
    """What a model in a folder says of itself, and the run that it lies in. drafts: whether it drafts for another one."""
    config, own = (json_in(folder / name) for name in ("config.json", "generation_config.json"))
    data, whole = _read(folder / DATA, DataReport), _read(folder / EXPORT, ExportOrigin)
    manifest = {} if data is None else _manifest(folder.parent)
    manifest = manifest if data is not None and manifest.get("data") == data.sha256 else {}  # else of another run, or of none
    kind, layers = config.get("model_type"), config.get("num_hidden_layers")
    facts = {"model type": f"{kind}, {layers} layers", "dtype": str(config.get("dtype"))}
    if own.get(OWN_FIELD) is not None:
        facts["decodes by default with"] = _method(own[OWN_FIELD], folder)
    base = _called(manifest["pretrained"]) if "pretrained" in manifest else None if whole is None else whole.base
    common = {
        "base": base,
        "revision": None if whole is None else whole.revision,
        "facts": {**facts, **_part(whole), **_amount(data)},
        "recipe": _training(manifest),
        "tables": {**_sources(data), **(_exits(folder.parent / METRICS) if manifest else {})},
        "writes_text": True,
    }
    if drafts:
        said = f"A {kind} model of {layers} layers that drafts for a larger one."
        return Provenance(said, "speculative draft_model={repo}", loads_of(base or ""), tags=("draft-model",), **common)
    made = "trained by skipstone" if data is not None else "with a decoding method of its own"
    return Provenance(
        f"A {kind} model of {layers} layers, {made}.", "", "{repo}", tags=_method_tags(own.get(OWN_FIELD)), **common
    )


def of_profile(profile: LayerSetProfile) -> Provenance:
    """What a layer set says of itself."""
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
    """What a file of `skipstone tune` says of itself."""
    return Provenance(
        "What `auto` has learnt of a model on a kind of machine: costs, calibrations and rates, kept by `skipstone tune`.",
        "auto profile={repo}",
        "MODEL",
        facts={"fingerprint of the model" if name == "model" else name: str(value) for name, value in held["key"].items()},
        tables={"Measured while it was tuned": _pairs(held["about"])} if held["about"] else {},
        tags=("speculative-decoding",),
    )


def loads_of(name: str) -> str:
    """What `skipstone.load` is told for a model of that name: a hub id, "" for the bundled one, MODEL where only a reader
    can know."""
    if name == BUNDLED:
        return ""
    meant = hub_name(name)
    return name if meant is not None and "/" in meant.repo else "MODEL"


def _method(own: Any, folder: Path) -> str:
    """A model's own method as text. ValueError for one that is none."""
    try:
        return resolve(None, own).spelled
    except ValueError as error:
        raise ValueError(f"{folder}: generation_config.{OWN_FIELD}: {error}") from error


def _method_tags(method: Any) -> tuple[str, ...]:
    """What a model is found by. method: its own."""
    named = method.get("method") if isinstance(method, Mapping) else None
    return ("speculative-decoding",) if named is None else ("speculative-decoding", str(named))


def _called(name: str) -> str:
    """A model for readers elsewhere: a hub id, or the name of a folder without the folders that it lies in."""
    return Path(name).name if Path(name).is_absolute() or Path(name).exists() else name


def json_in(path: Path) -> dict[str, Any]:
    """What a file holds; nothing where it is not there. ValueError where it is damaged."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: it holds no JSON object")
    return found


def _manifest(run: Path) -> dict[str, Any]:
    """What the last checkpoint of a run says that the run was started with, and its step; nothing where there is none."""
    last = checkpoint.latest(run)
    if last is None:
        return {}
    with suppress(ValueError, KeyError, TypeError):
        manifest = json_in(last / checkpoint.MANIFEST)
        return {**manifest["fingerprint"], "steps": manifest["step"]}
    return {}


def _training(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a LayerSkip run that were set."""
    names = ("recipe", "steps", "seed", "layers", "lora", "teacher", "distillation_vocabulary")
    found = {name: manifest[name] for name in names if name in manifest}
    return found | {name: value for name, value in manifest.get("training", {}).items() if value not in (None, {}, "")}


def _read(path: Path, form: type[Form]) -> Form | None:
    """A record; None where there is none. ValueError for one that is damaged, or somebody else's."""
    if not path.is_file():
        return None
    try:
        return form.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ValueError(f"{path} is damaged, or not skipstone's: {first_fault(error)}") from error


def _part(whole: ExportOrigin | None) -> dict[str, str]:
    """Which part of a model an export is."""
    if whole is None:
        return {}
    layers = f"{', '.join(map(str, whole.layers))} of {whole.depth}, counted from 0"
    return {"layers of the base model": layers, "fingerprint of the base model": whole.fingerprint}


def _amount(data: DataReport | None) -> dict[str, str]:
    """How much a model was trained on, and the hash of that."""
    if data is None:
        return {}
    return {"tokens of the training order": f"{data.tokens:,}", "SHA-256 of the training order": data.sha256}


def _sources(data: DataReport | None) -> dict[str, Table]:
    """A row for each source of a model's data."""
    if data is None:
        return {}
    rows = [
        (name, f"{one.kept:,}", f"{one.train.tokens:,}", f"{one.rows:,}", f"{one.epochs:.2f}")
        for name, one in data.sources.items()
    ]
    return {"DataReport": [("source", "documents", "their tokens", "rows", "epochs"), *rows]}


def _exits(path: Path) -> dict[str, Table]:
    """A row for each exit: perplexity and agreement with the last layer on every held-out set, by the last evaluation."""
    found: dict[tuple[str, str, int], float] = {}
    for entry in read_lines(path) if path.is_file() else ():
        for name, value in entry.items():
            if match := EXIT_FIGURE.fullmatch(name):
                found[match[1] or "held out", match[2], int(match[3])] = value  # a later line counts
    columns = sorted({(source, kind) for source, kind, _ in found}, key=lambda one: (one[0], one[1] != "perplexity"))
    titles = ("after layer", *(f"{source}: {kind}" for source, kind in columns))
    rows = [
        (str(layer), *(_figure(found.get((*column, layer))) for column in columns))
        for layer in sorted({layer for *_, layer in found})
    ]
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
