"""Imported first by the examples. It finds scripts/launcher.py, which finds the package in a checkout where
it is not installed. A copy of an example elsewhere does not need it: call `main` directly.
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from launcher import start as start  # noqa: E402
