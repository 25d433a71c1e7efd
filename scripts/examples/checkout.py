"""What the examples import first: it finds scripts/one_line.py, which finds the package in a checkout where
it is not installed. A copy of an example elsewhere needs neither: it calls `main` itself.
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from one_line import start as start  # noqa: E402
