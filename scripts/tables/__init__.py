"""The tables of the documentation, which scripts/make_tables.py writes. Each function returns the lines of a
table. The cases of the tests, in tests/support, say which features each family has.
"""

import sys
from pathlib import Path

_SUPPORT = str(Path(__file__).resolve().parents[2] / "tests" / "support")
if _SUPPORT not in sys.path:
    sys.path.insert(1, _SUPPORT)
