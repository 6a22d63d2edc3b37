"""Collects the records of an upload: its base model, training and measurements.

Records lie in the upload's own files, and for a finished run in the run's folder, one level up. Missing records are not
guessed."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from skipstone.engines.loading import BUNDLED, EXPORT
from skipstone.methods import resolve
from skipstone.methods.adadecode.heads import HeadsCard
from skipstone.methods.drafting.layer_sets import LayerSetProfile
from skipstone.models.fetching import hub_name
from skipstone.models.generation_config import OWN_FIELD
from skipstone.train import checkpoint
from skipstone.train.layerskip.metrics import EXIT_FIGURE
from skipstone.utils.files import read_lines

Table = Sequence[Sequence[str]]
"""Rows of cells, the titles first."""
METRICS = "metrics.jsonl"  # file in the folder of a LayerSkip run
DATA = "data.json"  # file of a trained model: the account of its data
TEXT = '"def add(a, b):"'
UNRECORDED = "not recorded"


@dataclass(frozen=True)
class Provenance:
    """summary: a sentence. method: how to decode with it; {repo} stands for the repository. "" for a model by itself. base: a
    hub id with or without a revision, a folder's name, or the bundled model's; None if it is unknown. facts: name -> value,
    except training's. tables: heading -> table."""

    summary: str
    method: str
    base: str | None = None
    revision: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
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
        facts["hash of the answers that they learnt from"] = manifest["answers"]
    titles = ("after layer", "KL", "first choice agrees", "sure", "right where sure")
    names = ("divergence", "agreement", "sure", "right")
    metrics = {layer: figures for layer, figures in card.metrics.items() if isinstance(figures, Mapping)}
    rows = [(layer, *(_change(figures, name) for name in names)) for layer, figures in metrics.items()]
    recipe = {name: value for name, value in card.training.items() if name not in ("seconds", "lm_head", "model_revision")}
    return Provenance(
        f"Exit heads for AdaDecode (arXiv 2506.03700) after layers {layers}: light heads at middle layers that predict early.",
        "adadecode heads={repo}",
        base=card.name or None,
        revision=card.training.get("model_revision"),
        facts=facts,
        recipe=recipe,
        tables={"Held-out answers, before training -> after": [titles, *rows]} if rows else {},
        tags=("adadecode", "early-exit"),
    )


def of_checkpoint(folder: Path, drafts: bool) -> Provenance:
    """The records of a model's folder and of its run. drafts: whether it drafts for another model. ValueError for damaged
    ones."""
    config, own = (json_in(folder / name) for name in ("config.json", "generation_config.json"))
    kind, layers, method = config.get("model_type"), config.get("num_hidden_layers"), own.get(OWN_FIELD)
    about = Provenance(f"A {kind} model of {layers} layers", "", writes_text=True)
    facts, tags = {"model type": f"{kind}, {layers} layers", "dtype": config.get("dtype")}, ["speculative-decoding"]
    if method is not None:
        try:
            chosen = resolve(None, method)
        except ValueError as error:
            raise ValueError(f"{folder}: generation_config.{OWN_FIELD}: {error}") from error
        facts["decodes by default with"] = chosen.spelled
        tags.append(chosen.name)
    about = replace(about, facts=facts)
    for name, add in ((EXPORT, _with_origin), (DATA, _with_training)):
        record = json_in(folder / name)
        try:
            about = add(about, record, folder) if (folder / name).is_file() else about
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{folder / name} is damaged, or not skipstone's: {error!r}") from error
    if about.recipe:  # of the run in the folder above
        about = replace(about, tables={**about.tables, **_exit_table(folder.parent / METRICS)})
    if drafts:
        said = f"{about.summary} that drafts for a larger one."
        return replace(about, summary=said, method="speculative draft_model={repo}", tags=("draft-model",))
    made = "trained by skipstone" if (folder / DATA).is_file() else "with a decoding method of its own"
    return replace(about, summary=f"{about.summary}, {made}.", tags=tuple(tags))


def _with_origin(about: Provenance, origin: Mapping[str, Any], folder: Path) -> Provenance:
    """origin: a draft's `export.json`, the model that it is a part of and which part."""
    layers = f"{', '.join(map(str, origin['layers']))} of {origin['depth']}, counted from 0"
    facts = {"layers of the base model": layers, "fingerprint of the base model": origin["fingerprint"]}
    return replace(about, base=origin["base"], revision=origin["revision"], facts={**about.facts, **facts})


def _with_training(about: Provenance, data: Mapping[str, Any], folder: Path) -> Provenance:
    """data: a model's `data.json`. The run in the folder above is the model's if it has the same data."""
    facts = {"tokens of the training order": f"{data['tokens']:,}", "SHA-256 of the training order": data["sha256"]}
    counts = [(name, one["kept"], one["train"]["tokens"], one["rows"], one["epochs"]) for name, one in data["sources"].items()]
    rows = [(name, *(f"{count:,}" for count in whole), f"{epochs:.2f}") for name, *whole, epochs in counts]
    tables: dict[str, Table] = {"Data": [("source", "documents", "their tokens", "rows", "epochs"), *rows]}
    about = replace(about, facts={**about.facts, **facts}, tables=tables)
    manifest = checkpoint.fingerprint_of(checkpoint.latest(folder.parent))
    if manifest.get("data") != data["sha256"]:
        return about
    start = manifest.get("pretrained")
    is_folder = start is not None and (Path(start).is_absolute() or Path(start).exists())
    base = about.base if start is None else Path(start).name if is_folder else start  # no path of this machine
    return replace(about, base=base, recipe=_training(manifest))


def of_profile(profile: LayerSetProfile) -> Provenance:
    """The records of a layer set."""
    sublayers = {"attention": profile.attention or "none", "mlp": profile.mlp or "none"}
    return Provenance(
        "A layer set for self-speculative decoding (arXiv 2309.08168): which sublayers drafting leaves out, found by "
        "`skipstone search`.",
        "self_speculative profile={repo}",
        base=profile.name or None,
        facts={"fingerprint of the model": profile.model, **sublayers},
        tables=_measured("Measured by the search", profile.about),
        tags=("self-speculative-decoding",),
    )


def of_tuned(held: Mapping[str, Any]) -> Provenance:
    """The records of a file of `skipstone tune`."""
    return Provenance(
        "What `auto` has learnt of a model on a kind of machine: costs, calibrations and rates, kept by `skipstone tune`.",
        "auto profile={repo}",
        facts={"fingerprint of the model" if name == "model" else name: str(value) for name, value in held["key"].items()},
        tables=_measured("Measured while it was tuned", held["about"]),
        tags=("speculative-decoding",),
    )


def loads_of(name: str) -> str:
    """The argument of `skipstone.load` for a model of that name: a hub id, "" for the bundled one, MODEL if only the reader
    knows it."""
    if name == BUNDLED:
        return ""
    meant = hub_name(name)
    return name if meant is not None and "/" in meant.repo else "MODEL"


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


def _exit_table(path: Path) -> dict[str, Table]:
    """A row per exit: perplexity and agreement with the last layer on every held-out set, from the last evaluation."""
    found: dict[tuple[str, str, int], float] = {}
    for entry in read_lines(path) if path.is_file() else ():
        for name, value in entry.items():
            if match := EXIT_FIGURE.fullmatch(name):
                found[match[1] or "held out", match[2], int(match[3])] = value  # a later line counts
    columns = sorted({key[:2] for key in found}, key=lambda one: (one[0], one[1] != "perplexity"))
    titles = ("after layer", *(f"{source}: {kind}" for source, kind in columns))
    layers = sorted({layer for *_, layer in found})
    rows = [(str(layer), *(_figure(found.get((*column, layer))) for column in columns)) for layer in layers]
    return {"Held-out text, at the end of training": [titles, *rows]} if rows else {}


def _measured(heading: str, about: Mapping[str, Any]) -> dict[str, Table]:
    rows = [(name.replace("_", " "), _figure(value)) for name, value in _flat(about)]
    return {heading: [("what", "value"), *rows]} if rows else {}


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
    return " -> ".join(map(_figure, ([] if before is None else [before]) + [figures.get(name)]))


def _figure(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
