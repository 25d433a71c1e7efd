"""Puts the checkout and `scripts/` on `sys.path`. It uses the standard library only."""

import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent
ROOT = SCRIPTS.parent

# After the folder of the program itself, before installed packages.
for _folder in (SCRIPTS, ROOT):
    if str(_folder) not in sys.path:
        sys.path.insert(1, str(_folder))
