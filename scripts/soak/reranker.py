"""Writes a reranker for the attacks: the bundled model, with a token for each of yes and no."""

import json
import shutil
from pathlib import Path

import xinfer_jax


def write_reranker(path: Path) -> Path:
    """Writes the checkpoint and returns its directory. "y" with "es", and "n" with "o", replace the last two
    merges of the tokenizer.
    """
    shutil.copytree(Path(xinfer_jax.__file__).parent / "assets", path)
    file = path / "tokenizer.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    model = settings["model"]
    words = {i: word for word, i in model["vocab"].items()}
    for number, merge in enumerate((["y", "es"], ["n", "o"]), 1):
        words[model["vocab"]["".join(model["merges"][-number])]] = "".join(merge)
        model["merges"][-number] = merge
    model["vocab"] = {word: i for i, word in words.items()}
    file.write_text(json.dumps(settings), encoding="utf-8")
    return path
