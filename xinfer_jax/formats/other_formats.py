"""Describes things that cannot be loaded as a checkpoint, and the things to give in their place."""

import fnmatch
import os
import re
from collections.abc import Iterable

from ..errors import format_names

_ADAPTER = "merge it into its base model (peft's merge_and_unload), save that and give its directory"
# What a directory's files are, by a pattern that some of them match; the first that matches counts.
_FILES = {
    "adapter_config.json": f"holds a LoRA adapter, not a model: {_ADAPTER}",
    "*.gguf": "holds a GGUF file ({}): to load a model, give the path of the file itself",
    "consolidated*": "holds weights in Mistral's or Meta's own format ({}), which is not read: fetch those in"
    " the format of transformers, model*.safetensors",
    "*.safetensors": "holds {} without model.safetensors.index.json, which says what each file has: fetch the"
    " index too, or rename a single file to model.safetensors",
    "*.bin": "holds pickled weights ({}): only safetensors weights are read, which save_pretrained of"
    " transformers writes",
}
_NO_WEIGHTS = (
    "holds neither model.safetensors nor model.safetensors.index.json: only safetensors weights are read"
)
_FILES |= dict.fromkeys(("*.pth", "*.pt"), _FILES["*.bin"])


def describe_files(names: Iterable[str], otherwise: str = _NO_WEIGHTS) -> str:
    """Describes the files that a directory holds in place of a checkpoint, as the rest of a sentence."""
    names = list(names)
    for pattern, what in _FILES.items():
        if found := sorted(fnmatch.filter(names, pattern)):
            return what.format(format_names(found, 1))
    return otherwise


def describe_name(name: str) -> str:
    """Describes the error in a name that is neither a directory nor a hub name: the rest of a sentence."""
    if address := re.match(r"\w+://([^/]*)/*([^/?#]+/[^/?#]+)?", name):
        (host, repository) = address.groups()
        is_hub = host.removeprefix("www.") in ("huggingface.co", "hf.co") and repository
        remedy = repr(repository) if is_hub else "a hub name owner/name or a directory"
        return f"is a web address: give {remedy}"
    path = os.path.expanduser(name)
    if os.path.islink(path) and not os.path.exists(path):
        return f"is a link to {os.readlink(path)!r}, which does not exist: correct the link"
    if not os.path.lexists(path):
        file = ", a GGUF file" if name.endswith(".gguf") else ""
        return f"does not exist: give a directory{file}, or a hub name owner/name"
    if not os.path.isfile(path):
        return "is neither a directory nor a file: give a directory, or a hub name owner/name"
    if name.endswith(".gguf"):
        return "is a GGUF file, where only a directory is read: give the safetensors that it was made from"
    kind = "safetensors file" if name.endswith(".safetensors") else "file"
    folder = os.path.dirname(path) or "."
    return f"is a {kind}, neither a directory nor a hub name: give its directory, {folder!r}"
