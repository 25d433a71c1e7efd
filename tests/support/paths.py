"""Paths of the checkout, its scripts, golden files, and data that may lie next to the checkout."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
SUPPORT = ROOT / "tests" / "support"
GOLDEN = ROOT / "tests" / "golden"
DATA = ROOT.parent / "shared" / "data"  # real models and tokenizers; tests that need them are skipped without
STORIES = DATA / "stories260K"
