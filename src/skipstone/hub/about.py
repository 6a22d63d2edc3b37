"""What was recorded of a thing that goes to the hub: what it is made of or for, how it was trained, what it was measured at.

Records lie in the thing's own files, and for a finished run in the run's folder, which is the one above. What nobody recorded
is not guessed.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skipstone.decoding.method import OWN_FIELD
from skipstone.fetching import hub_name
from skipstone.files import read_lines
from skipstone.loading import BUNDLED
from skipstone.methods import resolve
from skipstone.methods.adadecode.heads import HeadsCard
from skipstone.methods.shared.layer_sets import Profile
from skipstone.train import checkpoint
from skipstone.train.layerskip.metrics import EXIT_FIGURE

Table = Sequence[Sequence[str]]
"""Rows of cells, the titles first."""
METRICS = "metrics.jsonl"  # file in the folder of a LayerSkip run
DATA = "data.json"  # file of a trained model: the account of its data
TEXT = '"def add(a, b):"'
UNRECORDED = "not recorded"


@dataclass(frozen=True)
class About:
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


def of_heads(card: HeadsCard, folder: Path) -> About:
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
    ]
    recipe = {name: value for name, value in card.training.items() if name not in ("seconds", "lm_head", "model_revision")}
    return About(
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


def of_checkpoint(folder: Path, drafts: bool) -> About:
    """What a model in a folder says of itself, and the run that it lies in. drafts: whether it drafts for another one."""
    config, own, data = (json_in(folder / name) for name in ("config.json", "generation_config.json", DATA))
    run = folder.parent if data else None
    manifest = {} if run is None else _manifest(run)
    manifest = manifest if manifest.get("data") == data.get("sha256") else {}  # of another run, or of none
    kind, layers = config.get("model_type"), config.get("num_hidden_layers")
    made = "trained by skipstone" if data else "exported by skipstone" if drafts else "with a decoding method of its own"
    facts = {"model type": f"{kind}, {layers} layers", "dtype": str(config.get("dtype"))}
    if OWN_FIELD in own:
        facts["decodes by default with"] = resolve(None, own[OWN_FIELD]).spelled
    if data:
        facts |= {"tokens of the training order": f"{data['tokens']:,}", "SHA-256 of the training order": data["sha256"]}
    tables = {"Data": _sources(data)} if data else {}
    figures = _exits(run / METRICS) if manifest and run is not None else []
    return About(
        f"A {kind} model of {layers} layers, {made}" + (", that drafts for a larger one." if drafts else "."),
        "speculative draft_model={repo}" if drafts else "",
        "MODEL" if drafts else "{repo}",
        base=_called(manifest["pretrained"]) if "pretrained" in manifest else None,
        facts=facts,
        recipe=_training(manifest),
        tables=tables | ({"Held-out text, at the end of training": figures} if figures else {}),
        tags=("speculative-decoding", *_own_tags(own.get(OWN_FIELD), drafts)),
        writes_text=True,
    )


def of_profile(profile: Profile) -> About:
    """What a layer set says of itself."""
    facts = {"fingerprint of the model": profile.model}
    facts |= {name: ", ".join(map(str, getattr(profile, name))) or "none" for name in ("attention", "mlp")}
    return About(
        "A layer set for self-speculative decoding (arXiv 2309.08168): which sublayers drafting leaves out, found by "
        "`skipstone search`.",
        "self_speculative profile={repo}",
        loads_of(profile.name),
        base=profile.name or None,
        facts=facts,
        tables={"Measured by the search": _pairs(profile.about)} if profile.about else {},
        tags=("self-speculative-decoding",),
    )


def of_tuned(held: Mapping[str, Any]) -> About:
    """What a file of `skipstone tune` says of itself."""
    return About(
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


def _own_tags(method: Any, drafts: bool) -> tuple[str, ...]:
    """What a model is found by. method: its own."""
    named = isinstance(method, Mapping) and method.get("method")
    return ("draft-model",) if drafts else (str(named),) if named else ()


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


def _sources(data: Mapping[str, Any]) -> Table:
    """A row for each source of a model's data."""
    rows = []
    for name, one in data["sources"].items():
        rows.append((name, f"{one['kept']:,}", f"{one['train']['tokens']:,}", f"{one['rows']:,}", f"{one['epochs']:.2f}"))
    return [("source", "documents", "their tokens", "rows", "epochs"), *rows]


def _exits(path: Path) -> Table:
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
    return [titles, *rows] if rows else []


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
    before = figures.get("before", {}).get(name)
    return _figure(figures.get(name)) if before is None else f"{_figure(before)} -> {_figure(figures.get(name))}"


def _figure(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
