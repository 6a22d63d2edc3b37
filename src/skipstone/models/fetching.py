"""Files from repositories of the Hugging Face hub: ids with a revision, downloads, and one-sentence errors."""

import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

NAME = re.compile(r"([A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?)(?:@([^\s@]+))?")
"""A hub id (ORG/NAME or NAME), optionally with @REVISION."""
_UNREACHABLE = "the hub at {endpoint} cannot be reached{not_cached}"
_OFFLINE = "the hub is not asked (HF_HUB_OFFLINE is set), and its cache here does not have {file} of {repo}"
CLAUSES = {
    "GatedRepoError": "{repo} is gated on the hub: ask for access at {endpoint}/{repo} and log in (`hf auth login`)",
    "RepositoryNotFoundError": "the hub has no repository {repo}, or a private one that you may not see (`hf auth login`)",
    "RevisionNotFoundError": "{repo} has no revision {revision!r} on the hub",
    "RemoteEntryNotFoundError": "{repo} has no file {file} on the hub",
    "OfflineModeIsEnabled": _OFFLINE,
    # of the HTTP library, which changes
    **dict.fromkeys(("ConnectError", "ConnectTimeout", "ReadTimeout", "ProxyError"), _UNREACHABLE),
}
"""Messages by the name of an error's class or base class."""
COMMIT = re.compile("[0-9a-f]{40}")


class HubName(NamedTuple):
    """repo: ORG/NAME. revision: a branch, a tag or a commit; None for the main branch."""

    repo: str
    revision: str | None


def hub_name(name: str | Path) -> HubName | None:
    """Parse ORG/NAME or ORG/NAME@REVISION. None for a name that is no hub id."""
    match = NAME.fullmatch(str(name))
    return None if match is None else HubName(match[1], match[2])


def expect_repository(name: str) -> None:
    """ValueError unless a name is ORG/NAME."""
    meant = hub_name(name)
    if meant is None or "/" not in meant.repo or meant.revision is not None:
        raise ValueError(f"a repository is ORG/NAME, found {name!r} (a branch is named by --revision)")


@cache
def fetch(name: str, *files: str) -> Path:
    """Download files of a repository, all from one commit. Returns their folder in the hub's cache.

    name: as in `hub_name`. The hub is asked once per process, so that a name without a revision keeps its first commit. OSError
    with one sentence if the repository, revision or file does not exist, if the repository is gated, or if the hub cannot be
    reached and its cache does not have the files.
    """
    from huggingface_hub import hf_hub_download  # which a folder does not need
    from huggingface_hub.errors import HTTPError  # type: ignore[reportPrivateImportUsage]

    meant = hub_name(name)
    if meant is None:
        raise OSError(f"{name}: no folder or file here, and not a hub id either (ORG/NAME or ORG/NAME@REVISION)")
    folder, revision = None, meant.revision
    for file in files:
        try:
            folder = Path(hf_hub_download(meant.repo, file, revision=revision)).parent
        except (OSError, ValueError, HTTPError) as error:
            raise not_found_error(name, error, file) from error
        revision = folder.name if COMMIT.fullmatch(folder.name) else revision  # the others are of the same commit
    assert folder is not None, "a caller names at least one file"
    return folder


def fetch_optional(repo: str, commit: str, *files: str) -> None:
    """Download those of some files that a commit has and the hub's cache lacks. The cache also keeps which ones are missing.

    If the hub cannot be reached, the others are left out."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HTTPError, RemoteEntryNotFoundError  # type: ignore[reportPrivateImportUsage]

    with suppress(OSError, ValueError, HTTPError):
        for file in files:
            if try_to_load_from_cache(repo, file, revision=commit) is None:
                with suppress(RemoteEntryNotFoundError):
                    hf_hub_download(repo, file, revision=commit)


def local_or_fetched(source: str | Path, file: str) -> Path:
    """The local file, or a file of the hub if there is none and the name does not end in .json."""
    path = Path(source).expanduser()
    hub = None if path.exists() or path.suffix == ".json" else hub_name(source)
    return path if hub is None or "/" not in hub.repo else fetch(str(source), file) / file


def cached_folder(name: str, revision: str | None, file: str) -> Path | None:
    """The folder of a repository's cached file at a revision, named by its commit; None for a file that was not fetched."""
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(name, file, revision=revision)
    return Path(cached).parent if isinstance(cached, str) else None


def not_found_error(name: str, error: BaseException, file: str | None = None) -> OSError:
    """An OSError with one sentence about a name that was not found. file: the requested file."""
    return OSError(f"{name}: no folder or file here, and {explain_failure(name, error, file)}")


def explain_failure(name: str, error: BaseException, file: str | None = None) -> str:
    """Why the hub or its cache failed, as a clause. name: of the repository, with its revision."""
    from huggingface_hub import constants, errors

    meant = hub_name(name) or HubName(name, None)
    known = {"repo": meant.repo, "revision": meant.revision or constants.DEFAULT_REVISION, "endpoint": constants.ENDPOINT}
    known |= {"file": file or "its files", "not_cached": f", and its cache here does not have {file}" if file else ""}
    for one in _chain(error):
        for base in type(one).__mro__:
            if base.__name__ in CLAUSES:
                return CLAUSES[base.__name__].format(**known)
        if isinstance(one, errors.HfHubHTTPError):
            return f"the hub answers {one.response.status_code} for {meant.repo}: {one.server_message or _first_line(one)}"
    return _OFFLINE.format(**known) if constants.is_offline_mode() else f"from the hub: {_first_line(error)}"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes, the root cause first, which says the most."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    yield from reversed(found)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
