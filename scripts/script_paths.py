"""Puts the checkout, `scripts/` and its folders of helper modules on `sys.path`; standard library only."""

import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent
ROOT = SCRIPTS.parent
HELPERS = ("bench", "goodput", "gpu", "soak", "tpu", "train")

# After the folder of the program itself, before installed packages.
for _folder in (*(SCRIPTS / name for name in reversed(HELPERS)), SCRIPTS, ROOT):
    if str(_folder) not in sys.path:
        sys.path.insert(1, str(_folder))
