"""Writes the card of a repository, README.md: the records, the hash of every file, and three lines of Python to use it."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, try_to_load_from_cache

from skipstone import __version__
from skipstone.assets import NANO
from skipstone.engines.loading import BUNDLED
from skipstone.export.hub.provenance import TEXT, UNRECORDED, Provenance, Table, loads_of
from skipstone.models.fetching import HubName, hub_name

README = "README.md"
MARK = "<!-- `skipstone push` wrote this card and writes it anew. Without this line it leaves your card as it is. -->"


def write_card(about: Provenance, repo: str, digests: Mapping[str, tuple[int, str]], licence: str | None = None) -> str:
    """A card. repo: ORG/NAME, or ORG/NAME@BRANCH. digests: file -> (bytes, SHA-256). licence: the repository's; None for the
    base model's, if its card is on this machine."""
    base = hub_name(about.base) if about.base is not None and _cached(about.base, "config.json") else None
    licence = licence or (None if about.base is None else licence_of(about.base))
    header = ModelCardData(
        license=licence,
        base_model=None if base is None else base.repo,
        library_name="skipstone",
        pipeline_tag="text-generation" if about.writes_text else None,
        tags=["skipstone", *about.tags],
    )
    parts = [
        f"---\n{header.to_yaml()}\n---",
        f"# {repo.partition('@')[0].rpartition('/')[2]}",
        about.summary,
        f"## Use\n\n```python\n{use(about, repo)}\n```",
        _section("What it is", _facts(about, base)),
        _section("Training", _table({name.replace("_", " "): value for name, value in about.recipe.items()})),
        *(_section(heading, rows) for heading, rows in about.tables.items()),
        _section("Files", [("file", "bytes", "SHA-256"), *((name, f"{size:,}", sha) for name, (size, sha) in digests.items())]),
        _licence_section(licence, about.base),
        MARK,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def use(about: Provenance, repo: str) -> str:
    """Three lines of Python that decode with a repository's content."""
    loads = loads_of(about.base or "") if about.method else repo
    method = [f'"{about.method.format(repo=repo)}"'] if about.method else []
    given = ", ".join([TEXT, *method, "tokenizer=tokenizer", "max_new_tokens=64"])
    model = f'"{loads}"' if loads else ""
    note = "  # MODEL: the folder or hub id of the model that it belongs to" if loads == "MODEL" else ""
    return f"import skipstone\nmodel, tokenizer = skipstone.load({model}){note}\nprint(skipstone.generate(model, {given}).text)"


def licence_of(base: str) -> str | None:
    """The licence in the card of a base model, if the card is on this machine."""
    card = NANO / README if base == BUNDLED else _cached(base, README) or Path(base).expanduser() / README
    return licence_in(card.read_text("utf-8")) if card.is_file() else None


def licence_in(text: str) -> str | None:
    """The licence that a card names; None if it names none or has no readable header."""
    if not text:
        return None
    with suppress(ValueError, TypeError):
        found: Any = ModelCard(text, ignore_metadata_errors=True).data.to_dict().get("license")
        return found if isinstance(found, str) else None
    return None


def _cached(name: str, file: str) -> Path | None:
    """A file of a repository in the hub's cache on this machine. A folder's name may look like a hub id."""
    meant = hub_name(name)
    if meant is None or "/" not in meant.repo or Path(name).exists():
        return None
    found = try_to_load_from_cache(meant.repo, file, revision=meant.revision)
    return Path(found) if isinstance(found, str) else None


def _facts(about: Provenance, base: HubName | None) -> Table:
    revision = about.revision or (None if base is None else base.revision)
    of = {} if about.base is None else {"base model": about.base.partition("@")[0]}
    if base is not None or revision is not None:
        of["revision of the base model"] = revision or UNRECORDED
    return _table({**of, **about.facts, "pushed by": f"skipstone {__version__}"})


def _licence_section(licence: str | None, base: str | None) -> str:
    if licence is not None:
        return ""
    of = "" if base is None else " What was trained from a model, or reads its states, may be bound by that model's licence."
    return f"## Licence\n\nNone was chosen yet: add `license:` to the header of this file.{of}"


def _table(values: Mapping[str, Any]) -> Table:
    """A table with a row for each value that is not None."""
    known = {name: value for name, value in values.items() if value is not None}
    rows = [(name, ", ".join(map(str, one)) if isinstance(one, (list, tuple)) else str(one)) for name, one in known.items()]
    return [("what", "value"), *rows] if rows else []


def _section(heading: str, rows: Table) -> str:
    """A heading and a table; "" if the table has no rows."""
    if not rows:
        return ""
    titles, *others = [[" ".join(text.replace("|", "\\|").split()) for text in row] for row in rows]
    lines = [titles, ["---"] * len(titles), *others]
    return f"## {heading}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)
