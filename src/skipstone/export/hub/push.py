"""Upload what was made here to a repository of the Hugging Face hub, in one commit."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, errors, hf_hub_download

from skipstone import __version__
from skipstone.export.hub.card import MARK, README, licence_in, written
from skipstone.export.hub.upload_contents import INDEX, MARKS, MODEL, UploadContents, parcel_of
from skipstone.models.fetching import HTTP_ERROR, expect_repository, explain_failure


def push(
    path: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> str:
    """Upload a model, exit heads or a profile to a model repository of the hub, made where there is none, with a card.

    path: the folder of a model that skipstone has trained or exported, or of exit heads, or the file of a profile of `skipstone
    search` or `skipstone tune`. repo_id: ORG/NAME. private: whether only its owners may see it. revision: the branch, made
    where there is none; None for the main one. say: is told what is left as it was. All files come in one commit, or none does;
    nothing is written here. The token is that of `hf auth login` or HF_TOKEN, the hub that of HF_ENDPOINT.

    Returns the address of the commit. ValueError for what skipstone has not made, for what is incomplete or damaged, for a
    repository that holds something of another kind, and for private where it is public; OSError where the hub refuses or cannot
    be reached.
    """
    expect_repository(repo_id)
    parcel, made, hub = parcel_of(Path(path).expanduser()), False, HfApi(library_name="skipstone", library_version=__version__)
    try:
        there = _there(hub, repo_id, revision)
        _check(there, repo_id, parcel, private)
        changes = _changes(there, repo_id, parcel, revision, say)
        if there is None:
            hub.create_repo(repo_id, private=private or None)  # an organisation may make all of its own private
            made = True
        if revision is not None:
            hub.create_branch(repo_id, branch=revision, exist_ok=True)
        message = f"{parcel.kind}, by skipstone {__version__}"
        return hub.create_commit(repo_id, changes, commit_message=message, revision=revision).commit_url
    except (HTTP_ERROR, OSError) as error:
        new = "; the repository was made for it" if made else ""
        raise OSError(f"the push to {repo_id} failed: {explain_failure(repo_id, error)}{new}") from error


def card_of(parcel: UploadContents, repo_id: str, revision: str | None = None, licence: str | None = None) -> str:
    """The README.md that goes with a parcel: the user's own where there is one, else one that is written from the records.
    licence: that the repository has already."""
    own = parcel.files.get(README)
    if isinstance(own, Path):
        return own.read_text(encoding="utf-8")
    return written(parcel.about, repo_id if revision is None else f"{repo_id}@{revision}", parcel.digests, licence)


@dataclass(frozen=True)
class Repository:
    """What a repository holds already. card: its README.md; "" where it has none."""

    private: bool
    files: tuple[str, ...]
    card: str = ""

    @property
    def keeps_card(self) -> bool:
        """Whether its card says something that skipstone has not written."""
        return MARK not in self.card and bool(ModelCard(self.card, ignore_metadata_errors=True).text.strip())


def _there(hub: HfApi, repo_id: str, revision: str | None) -> Repository | None:
    """What a branch holds, or what it would begin with; None where there is no such repository."""
    try:
        found = hub.model_info(repo_id, revision=revision)
    except errors.GatedRepoError:
        raise
    except errors.RepositoryNotFoundError:
        return None
    except errors.RevisionNotFoundError:
        found = hub.model_info(repo_id)
    files = tuple(one.rfilename for one in found.siblings or ())
    if README not in files:
        return Repository(bool(found.private), files)
    with tempfile.TemporaryDirectory() as place:
        card = Path(hf_hub_download(repo_id, README, revision=found.sha, local_dir=place)).read_text(encoding="utf-8")
    return Repository(bool(found.private), files, card)


def _check(there: Repository | None, repo_id: str, parcel: UploadContents, private: bool) -> None:
    """ValueError where a repository is not one that these files go to."""
    if there is None:
        return
    if private and not there.private:
        raise ValueError(f"{repo_id} is there already and public: make it private in its settings, or push without --private")
    kinds = {MARKS[name] for name in there.files if name in MARKS}
    if kinds - {parcel.kind}:
        raise ValueError(f"{repo_id} holds {' and '.join(sorted(kinds))}: {parcel.kind} needs a repository of its own")


def _changes(
    there: Repository | None, repo_id: str, parcel: UploadContents, revision: str | None, say: Callable[[str], None]
) -> list[Any]:
    """What the commit changes: files that come, and those of an earlier push that nobody would read but by mistake."""
    added = {name: content for name, content in parcel.files.items() if name != README}
    if there is not None and there.keeps_card and README not in parcel.files:
        say(f"{README} of {repo_id} stays as it is: somebody wrote it, so it says nothing new of these files")
    else:
        added[README] = card_of(parcel, repo_id, revision, licence_in(there.card) if there else None).encode()
    stale = () if there is None or parcel.kind != MODEL else [name for name in there.files if _is_weights(name)]
    return [
        *(CommitOperationAdd(name, one if isinstance(one, bytes) else str(one)) for name, one in added.items()),
        *(CommitOperationDelete(name) for name in stale if name not in added),
    ]


def _is_weights(name: str) -> bool:
    """Whether transformers would read a file of a repository as a model's weights, or as a list of them."""
    return name == INDEX or (name.startswith("model") and name.endswith(".safetensors") and "/" not in name)
