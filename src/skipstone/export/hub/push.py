"""Upload what was made here to a repository of the Hugging Face hub, in one commit."""

import tempfile
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, errors, hf_hub_download
from huggingface_hub.errors import HTTPError  # type: ignore[reportPrivateImportUsage]

from skipstone import __version__
from skipstone.export.hub.card import MARK, README, licence_in, write_card
from skipstone.export.hub.upload_contents import INDEX, MARKS, MODEL, UploadContents, collect_upload
from skipstone.models.fetching import expect_repository, explain_failure
from skipstone.train import Say, silent


def push(path: str | Path, repo_id: str, *, private: bool = False, revision: str | None = None, say: Say = silent) -> str:
    """Upload a model, exit heads or a profile, with a card, to a model repository of the hub in one commit.

    path: the folder of a model that skipstone has trained or exported, or of exit heads, or the file of a profile of `skipstone
    search` or `skipstone tune`. repo_id: ORG/NAME; a missing repository is made. private: whether only its owners may see it.
    revision: the branch, made if it is missing; None for the main one. say: shows which files stay unchanged. No local file is
    written. The token is that of `hf auth login` or HF_TOKEN, the hub that of HF_ENDPOINT.

    Returns the address of the commit. ValueError for what skipstone has not made, for what is incomplete or damaged, for a
    repository of another kind, and for private if the repository is public; OSError if the hub refuses or cannot be reached.
    """
    expect_repository(repo_id)
    contents, made = collect_upload(Path(path).expanduser()), False
    hub = HfApi(library_name="skipstone", library_version=__version__)
    try:
        repository = _find_repository(hub, repo_id, revision)
        _check(repository, repo_id, contents, private)
        changes = _changes(repository, repo_id, contents, revision, say)
        if not repository.exists:
            hub.create_repo(repo_id, private=private or None)  # an organisation may make all of its own private
            made = True
        if revision is not None:
            hub.create_branch(repo_id, branch=revision, exist_ok=True)
        message = f"{contents.kind}, by skipstone {__version__}"
        return hub.create_commit(repo_id, changes, commit_message=message, revision=revision).commit_url
    except (HTTPError, OSError) as error:
        new = "; the repository was made for it" if made else ""
        raise OSError(f"the push to {repo_id} failed: {explain_failure(repo_id, error)}{new}") from error


def card_of(contents: UploadContents, repo_id: str, revision: str | None = None, licence: str | None = None) -> str:
    """The README.md of an upload: the user's own if there is one, else one that is written from the records.
    licence: that the repository has already."""
    own = contents.files.get(README)
    if isinstance(own, Path):
        return own.read_text(encoding="utf-8")
    return write_card(contents.about, repo_id if revision is None else f"{repo_id}@{revision}", contents.digests, licence)


@dataclass(frozen=True)
class Repository:
    """What a repository holds now; a new one holds nothing. card: its README.md; "" if it has none."""

    private: bool = True
    files: tuple[str, ...] = ()
    card: str = ""
    exists: bool = True

    @property
    def keeps_card(self) -> bool:
        """Whether somebody else wrote its card."""
        return (
            bool(self.card) and MARK not in self.card and bool(ModelCard(self.card, ignore_metadata_errors=True).text.strip())
        )


def _find_repository(hub: HfApi, repo_id: str, revision: str | None) -> Repository:
    """The content of a branch, or of the main branch if that one is missing."""
    try:
        found = hub.model_info(repo_id, revision=revision)
    except errors.GatedRepoError:
        raise
    except errors.RepositoryNotFoundError:
        return Repository(exists=False)
    except errors.RevisionNotFoundError:
        found = hub.model_info(repo_id)
    files = tuple(one.rfilename for one in found.siblings or ())
    if README not in files:
        return Repository(bool(found.private), files)
    with tempfile.TemporaryDirectory() as place:
        card = Path(hf_hub_download(repo_id, README, revision=found.sha, local_dir=place)).read_text(encoding="utf-8")
    return Repository(bool(found.private), files, card)


def _check(repository: Repository, repo_id: str, contents: UploadContents, private: bool) -> None:
    """ValueError if these files must not go to a repository."""
    if private and not repository.private:
        raise ValueError(f"{repo_id} is there already and public: make it private in its settings, or push without --private")
    kinds = {MARKS[name] for name in repository.files if name in MARKS}
    if kinds - {contents.kind}:
        raise ValueError(f"{repo_id} holds {' and '.join(sorted(kinds))}: {contents.kind} needs a repository of its own")


def _changes(repository: Repository, repo: str, contents: UploadContents, revision: str | None, say: Say) -> list[Any]:
    """The commit's operations: new files, and the removal of stale weights of an earlier push."""
    added = {name: content for name, content in contents.files.items() if name != README}
    if repository.keeps_card and README not in contents.files:
        say(f"{README} of {repo} stays as it is: somebody wrote it, so it says nothing new of these files")
    else:
        added[README] = card_of(contents, repo, revision, licence_in(repository.card)).encode()
    # what transformers would read as a model's weights, or as their index
    there = repository.files if contents.kind == MODEL else ()
    stale = [name for name in there if name == INDEX or (fnmatchcase(name, "model*.safetensors") and "/" not in name)]
    return [
        *(CommitOperationAdd(name, one if isinstance(one, bytes) else str(one)) for name, one in added.items()),
        *(CommitOperationDelete(name) for name in stale if name not in added),
    ]
