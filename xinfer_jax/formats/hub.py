"""Finds a checkpoint by directory or by its name on the Hugging Face hub, from which it is downloaded."""

import dataclasses
import glob
import os
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from ..errors import InputError, format_value
from .files import BUNDLED, INDEX, TEXT_FILES, WEIGHTS, file_exists, read_index
from .other_formats import describe_files, describe_name

# Patterns of the files of a model that are downloaded; then the shards that the index names.
_PATTERNS = (
    "modules.json", "config_sentence_transformers.json", "*_Pooling/config.json", "*_Dense/config.json",
    "*_Dense/model.safetensors", "config.json", "quantize_config.json", "quant_config.json",
    "adapter_config.json", *TEXT_FILES, WEIGHTS, INDEX,
)  # fmt: skip
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
# The remedy, by the class of an exception of huggingface_hub; the first class that it has counts.
_REMEDIES = {
    "GatedRepoError": f"accept its terms on its page on the hub, and {_LOG_IN}",
    "RepositoryNotFoundError": f"check the name; if the repository is private, {_LOG_IN}",
    "RevisionNotFoundError": "give a branch, a tag or a commit that the repository has",
}
_NO_CONNECTION = "check the connection, or give a directory"


@dataclasses.dataclass(frozen=True)
class HubOptions:
    """The options that say how the files of a repository on the hub are found.

    Attributes:
        revision: a branch, a tag or a commit. None: the default branch. A directory has no revision.
        token: an access token. True: the token of `hf auth login`. False: no token. None: the token of `hf
            auth login` or of the environment variable HF_TOKEN, if there is one.
        subfolder: the folder of the repository, or of a directory, that has the files. "": its root.
        local_files_only: True: only files that were downloaded before are taken, and the hub is not asked.
    """

    revision: str | None = None
    token: str | bool | None = dataclasses.field(default=None, repr=False)
    subfolder: str = ""
    local_files_only: bool = False

    def check(self) -> None:
        """Raises InputError for a value of the wrong type, or a subfolder outside of the repository."""
        revision = self.revision
        if revision is not None and not (isinstance(revision, str) and revision):
            raise InputError(
                f"revision must be a branch, a tag or a commit, got {format_value(revision)}: give its name,"
                " or None"
            )
        if not isinstance(self.token, str | bool | None):
            got = type(self.token).__name__
            raise InputError(f"token must be a text, True, False or None, got {got}: give the token's text")
        if not isinstance(self.local_files_only, bool):
            got = format_value(self.local_files_only)
            raise InputError(f"local_files_only must be True or False, got {got}: give one of them")
        subfolder = self.subfolder
        parts = PurePosixPath(subfolder).parts if isinstance(subfolder, str) else ("..",)
        if ".." in parts or "/" in parts:
            raise InputError(
                f"subfolder must be a relative path within the checkpoint, got {format_value(subfolder)}:"
                " give one without .."
            )

    @property
    def _folder(self) -> str:
        """The subfolder in its plain form, as names on the hub have it. "": the root."""
        folder = PurePosixPath(self.subfolder).as_posix()
        return "" if folder == "." else folder

    @property
    def is_default(self) -> bool:
        """Returns True if neither a revision nor a subfolder is given."""
        return self.revision is None and not self.subfolder

    def within(self, path: Path, noun: str, name: str) -> Path:
        """Returns the subfolder of a directory. Raises InputError if it does not exist."""
        folder = path / self.subfolder
        if not folder.is_dir():
            raise InputError(
                f"{noun} {name!r} has no folder {self.subfolder!r}: give a subfolder that it has, or none"
            )
        return folder

    def download(self, name: str, patterns: list[str]) -> Path:
        """Downloads the files of the subfolder that match a pattern. Returns the directory of the whole
        snapshot, which is named after its commit.
        """
        import huggingface_hub  # here, since its import is slow

        prefix = f"{glob.escape(self._folder)}/" if self._folder else ""
        path = huggingface_hub.snapshot_download(
            name,
            revision=self.revision,
            token=self.token,
            local_files_only=self.local_files_only,
            allow_patterns=[prefix + pattern for pattern in patterns],
        )
        return Path(path)

    def files(self, name: str) -> list[str]:
        """Returns the names of all files of the subfolder on the hub."""
        import huggingface_hub

        names = huggingface_hub.list_repo_files(name, revision=self.revision, token=self.token)
        prefix = f"{self._folder}/" if self._folder else ""
        return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]


HUB_DEFAULTS = HubOptions()
Download = Callable[[str, HubOptions], Path]


def split_revision(name: str) -> tuple[str, str | None]:
    """Returns the name without its revision, and the revision: "owner/name" and "main" of "owner/name@main".
    A name without a revision is returned with None.
    """
    before, at, revision = name.partition("@")
    is_name = _HUB_NAME.fullmatch(before) or os.path.isdir(os.path.expanduser(before))
    if at and is_name and not os.path.isdir(os.path.expanduser(name)):
        return before, revision
    return name, None


def checkpoint_path(
    path_or_repo_id: str | Path | None, noun: str = "model", hub: HubOptions = HUB_DEFAULTS
) -> Path:
    """Returns the GGUF file or the directory of a checkpoint, as `checkpoint_dir` finds it.

    Args:
        path_or_repo_id: None: the bundled checkpoint.
        noun: names it in errors.
        hub: options that say how it is found on the hub.
    """
    hub.check()
    if not isinstance(path_or_repo_id, str | os.PathLike | None):
        got = format_value(path_or_repo_id)
        raise InputError(
            f"the {noun} must be a directory or a hub name, got {got}: give one of them as a text"
        )
    path = BUNDLED if path_or_repo_id is None else Path(os.path.expanduser(path_or_repo_id))
    if path_or_repo_id is not None and not is_gguf(path):
        return resolve_directory(path_or_repo_id, download_model, noun, hub)
    if not hub.is_default:
        which = f"the file {str(path)!r}" if path_or_repo_id else "the bundled checkpoint"
        raise InputError(
            f"{which} has no revision and no subfolder: give the {noun} as owner/name, or neither"
        )
    return path


def is_gguf(path: Path) -> bool:
    """Returns True if a path is a file whose name ends in ".gguf"."""
    return path.suffix.lower() == ".gguf" and os.path.isfile(path)


def checkpoint_dir(path_or_repo_id: str | Path) -> Path:
    """Returns the directory of a checkpoint. If the argument is owner/name or owner/name@revision, it is
    downloaded from the Hugging Face hub. Raises InputError.
    """
    return resolve_directory(path_or_repo_id, download_model, "model")


def resolve_directory(
    path_or_repo_id: str | Path, download: Download, noun: str, hub: HubOptions = HUB_DEFAULTS
) -> Path:
    """Returns a directory, or the one that `download` makes of a hub repository's files.

    Args:
        path_or_repo_id: a directory, owner/name or owner/name@revision.
        download: `download_model` or `download_adapter`.
        noun: "model" or "adapter", for errors.
        hub: options that say how it is found on the hub.

    Raises:
        InputError: it is neither a directory nor a hub name, or it cannot be downloaded. Or there are a
            directory and a revision, or two revisions that differ.
    """
    hub.check()
    name = str(path_or_repo_id)
    repository, revision = split_revision(name)
    if revision == "":
        raise InputError(
            f"{noun} {name!r} has no revision after the @: give {repository}@main, or {repository}"
        )
    if None not in (revision, hub.revision) and revision != hub.revision:
        raise InputError(
            f"{noun} {name!r} and revision={format_value(hub.revision)} name two revisions: give one of them"
        )
    hub = dataclasses.replace(hub, revision=revision or hub.revision)
    path = Path(os.path.expanduser(repository))
    try:
        is_directory = path.is_dir()
    except OSError as error:
        raise InputError(f"{noun} {name!r} cannot be opened: {error}") from error
    if is_directory and hub.revision is not None:
        raise InputError(
            f"{noun} {repository!r} is a local directory, which has no revision {hub.revision!r}: leave the"
            " revision out, or give the name of a repository on the hub"
        )
    if is_directory:
        return hub.within(path, noun, name)
    is_hub_name = _HUB_NAME.fullmatch(repository) and not repository.endswith(".gguf")
    if os.path.lexists(path) or not is_hub_name:
        raise InputError(f"{noun} {name!r} {describe_name(repository)}")
    try:
        return hub.within(download(repository, hub), noun, name)
    except InputError:
        raise
    except Exception as error:  # network, permission, missing repository: many types
        # Not chained: the traceback of the hub's package says nothing more.
        raise InputError(f"{noun} {name!r} {_describe_failure(error, hub)}") from None


def _describe_failure(error: Exception, hub: HubOptions) -> str:
    """Says why a download failed, and names the remedy: the rest of a sentence."""
    classes = [each.__name__ for each in type(error).__mro__]
    if {"LocalEntryNotFoundError", "OfflineModeIsEnabled"} & {*classes}:
        from huggingface_hub import constants

        why = "does not exist here, and the local cache of the hub lacks it or some of its files, while"
        if hub.local_files_only:
            remedy = "load it once without local_files_only, or give a directory"
            return f"{why} local_files_only is True: {remedy}"
        if constants.HF_HUB_OFFLINE:
            remedy = "unset HF_HUB_OFFLINE to download it, or give a directory"
            return f"{why} HF_HUB_OFFLINE is set: {remedy}"
    lines = str(error).strip().splitlines()
    reason = (lines[0] if lines else type(error).__name__).rstrip(".")
    remedy = next((_REMEDIES[each] for each in classes if each in _REMEDIES), _NO_CONNECTION)
    return f"does not exist here, and it could not be fetched from the hub: {reason}: {remedy}"


def download_adapter(name: str, hub: HubOptions) -> Path:
    """Downloads an adapter's files from the hub, and returns the directory of the snapshot."""
    return hub.download(name, ["adapter_*"])


def download_model(name: str, hub: HubOptions) -> Path:
    """Downloads a hub repository's files that loading needs, and returns the directory of the snapshot."""
    path = hub.download(name, list(_PATTERNS))
    # The directory of a snapshot is named after its commit: the shards are of that one too.
    hub = dataclasses.replace(hub, revision=path.name)
    folder = hub.within(path, "model", name)
    if file_exists(folder / WEIGHTS):
        return path
    weight_map = read_index(folder)
    if weight_map is None and hub.local_files_only:
        raise InputError(
            f"model {name!r} has no weights in the local cache of the hub, while local_files_only is True:"
            " load it once without local_files_only, or give a directory"
        )
    if weight_map is None:
        raise InputError(f"model {name!r} {describe_files(hub.files(name))}")
    return hub.download(name, [glob.escape(shard) for shard in sorted({*weight_map.values()})])
