"""Files from repositories of the Hugging Face hub: ids with a revision or a GGUF file's tag, downloads, one-sentence errors."""

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

NAME = re.compile(r"([A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?)(?:@([^\s@:]+))?(?::([\w.-]+))?")
"""A hub id (ORG/NAME or NAME), optionally with @REVISION and :TAG."""
GGUF_FILE = re.compile(r"(?P<model>.*?)(?:-\d{5}-of-(?P<parts>\d{5}))?\.gguf")
NO_MODEL = re.compile(r"mmproj|imatrix", re.IGNORECASE)
"""In names of GGUF files that hold an image projector or an importance matrix."""
TAG = re.compile(r"(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|BF16|F16|F32))(?:/[^/]*)?$", re.IGNORECASE)
"""The quantisation in a GGUF model's path: at the end of its name, or its folder."""
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
    """repo: ORG/NAME. revision: a branch, a tag or a commit; None for the main branch. tag: quantisation of a GGUF file."""

    repo: str
    revision: str | None
    tag: str | None = None


def hub_name(name: str | Path) -> HubName | None:
    """Parse ORG/NAME, ORG/NAME@REVISION, or one of them with :TAG. None for a name that is no hub id, such as a file's."""
    match = NAME.fullmatch(str(name))
    return None if match is None or match[1].endswith(".gguf") else HubName(*match.groups())


def expect_repository(name: str) -> None:
    """ValueError unless a name is ORG/NAME."""
    meant = hub_name(name)
    if meant is None or "/" not in meant.repo or meant[1:] != (None, None):
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
    if meant is None or meant.tag is not None:
        raise OSError(f"{name}: no folder or file here, and not a hub id either (ORG/NAME or ORG/NAME@REVISION)")
    folder, revision = None, meant.revision
    for file in files:
        try:
            folder = Path(hf_hub_download(meant.repo, file, revision=revision)).parents[file.count("/")]
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


def local_model(name: str | Path) -> str | Path:
    """The path of the GGUF file that ORG/NAME:TAG means, downloaded if the hub's cache lacks it. Other names stay."""
    meant = hub_name(name)
    if meant is None or meant.tag is None or Path(name).exists():
        return name
    return fetch_gguf(str(name).removesuffix(f":{meant.tag}"), meant.tag)


@cache
def fetch_gguf(name: str, tag: str) -> Path:
    """Download all parts of a GGUF model of a repository. Returns the path of the first one in the hub's cache.

    name: ORG/NAME or ORG/NAME@REVISION. tag: what the file's name or its folder ends with, in any case, such as Q4_K_M. Errors
    as of `fetch`; also an OSError if no model, or several ones, have the tag.
    """
    models = _gguf_models(_repository_files(name))
    pattern = re.compile(rf"(?:^|[-._/]){re.escape(tag)}(?:/[^/]*)?$", re.IGNORECASE)
    named = [model for model in models if pattern.search(model)]
    chosen = [model for model in named if _tag_of(model).lower() == tag.lower()] or named
    if len(chosen) == 1:
        files = models[chosen[0]]
        return fetch(name, *files) / files[0]
    if chosen:
        raise OSError(
            f"{name} has several GGUF files {tag}: name one by all of its name, such as {name}:{Path(chosen[0]).name}"
        )
    raise OSError(f"{name} has no GGUF file {tag}: it has {', '.join(sorted({*map(_tag_of, models)})) or 'no GGUF files'}")


def choose_gguf_error(name: str) -> OSError | None:
    """An OSError for a repository that has GGUF files and no safetensors. None for others."""
    try:
        files = _repository_files(name)
    except OSError:
        return None
    tags = sorted({*map(_tag_of, _gguf_models(files))})
    if not tags or any(file.endswith(".safetensors") for file in files):
        return None
    words = f"{name} has GGUF files in the place of safetensors, {', '.join(tags)}: name one of them, such as"
    return OSError(f"{words} {name}:{'Q4_K_M' if 'Q4_K_M' in tags else tags[0]}")


def _repository_files(name: str) -> list[str]:
    """Paths of a repository's files. If the hub cannot be reached, those in its cache. Errors as of `fetch`."""
    from huggingface_hub import model_info, snapshot_download
    from huggingface_hub.errors import HTTPError  # type: ignore[reportPrivateImportUsage]

    meant = hub_name(name)
    assert meant is not None
    try:
        return [one.rfilename for one in model_info(meant.repo, revision=meant.revision).siblings or ()]
    except (OSError, ValueError, HTTPError) as error:
        try:
            folder = Path(snapshot_download(meant.repo, revision=meant.revision, local_files_only=True))
        except (OSError, ValueError):
            raise not_found_error(name, error) from error
        return [path.relative_to(folder).as_posix() for path in folder.rglob("*")]


def _gguf_models(files: Iterable[str]) -> dict[str, list[str]]:
    """All parts of each GGUF model among some files, by its path without the ending."""
    models: dict[str, list[str]] = {}
    for file in files:
        match = GGUF_FILE.fullmatch(file)
        if match is not None and NO_MODEL.search(file) is None:
            model, parts = match["model"], match["parts"]
            numbers = [""] if parts is None else [f"-{part:05d}-of-{parts}" for part in range(1, int(parts) + 1)]
            models[model] = [f"{model}{number}.gguf" for number in numbers]
    return models


def _tag_of(model: str) -> str:
    """The quantisation that a GGUF model's path names, else the model's name."""
    match = TAG.search(model)
    return Path(model).name if match is None else match[1]


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
    is_missing = any(type(one).__name__ == "RemoteEntryNotFoundError" for one in _chain(error))
    choose_gguf = choose_gguf_error(name) if is_missing and file == "config.json" else None
    return choose_gguf or OSError(f"{name}: no folder or file here, and {explain_failure(name, error, file)}")


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
