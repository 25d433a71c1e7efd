"""The tables of the documentation are those that scripts/make_tables.py makes from code and tests, and the
texts that they need are complete: a new family, setting, flag, field or metric has to be described.
"""

import re
from types import SimpleNamespace

import pytest
from paths import ROOT
from run_script import functions
from tables import environment, families, http_fields, markdown, metrics, settings

from xinfer_jax.errors import InputError
from xinfer_jax.estimates.model_shapes import SHAPES
from xinfer_jax.plugins import names

make_tables = functions("make_tables")  # its flag --check is not left behind
pytestmark = pytest.mark.oldest

TEXTS = {path: path.read_text(encoding="utf-8") for path in markdown.pages(ROOT)}
BLOCKS = [(path, name) for path, text in TEXTS.items() for _, name, *_ in markdown.BLOCK.findall(text)]


@pytest.mark.parametrize(("path", "name"), BLOCKS, ids=[name for _, name in BLOCKS])
def test_table_is_the_one_that_the_script_makes(path, name):
    (block,) = [found for found in markdown.BLOCK.finditer(TEXTS[path]) if found[2] == name]
    stale = markdown.stale_blocks(block[0], make_tables.TABLES)
    assert not stale, f"{path.relative_to(ROOT)}: run python scripts/make_tables.py"


def test_every_table_is_shown_once():
    assert sorted(name for _, name in BLOCKS) == sorted(make_tables.TABLES)


@pytest.mark.unit
def test_blocks_are_found_and_written():
    tables = {"a": lambda: markdown.table(["x|y"], [["1"]])}
    text = "Before.\n<!-- table: a -->\nold\n<!-- end -->\nAfter.\n"
    assert markdown.stale_blocks(text, tables) == ["a"]
    new = markdown.with_new_blocks(text, tables)
    assert new == "Before.\n<!-- table: a -->\n\n| x\\|y |\n|---|\n| 1 |\n\n<!-- end -->\nAfter.\n"
    assert markdown.stale_blocks(new, tables) == []
    with pytest.raises(InputError, match="names the table 'b': the tables are a"):
        markdown.stale_blocks(text.replace("table: a", "table: b"), tables)


@pytest.mark.unit
def test_a_feature_without_a_check_is_not_called_tested(monkeypatch):
    for feature in ("quantized", "fp8_files", "adapters", "engine", "drafts", "draft_model"):
        assert families._feature(feature, "qwen2") == families.TESTED
        with monkeypatch.context() as without:
            without.delitem(families.CHECKS, feature)
            assert families._feature(feature, "qwen2") == families.NO


@pytest.mark.unit
def test_every_family_and_its_shape_are_described():
    assert {*families.PUBLISHED} == {*names("family")}
    shapes = {hf["model_type"] for hf in SHAPES.values()}
    assert {*families.PUBLISHED} == shapes | {*families._STAND_INS}


def test_gguf_architectures_are_those_that_the_tests_write():
    gguf_files = pytest.importorskip("gguf_files", reason="the package gguf writes the files")
    written = {hf["model_type"] for hf in gguf_files.CONFIGS.values()}
    assert written == families.GGUF_FAMILIES


def test_every_metric_route_and_field_is_described():
    assert {family.name for family in metrics.reported()} == {*metrics.MEANINGS}
    assert {*http_fields.served_routes()} == {*http_fields.ROUTES, *http_fields._ALIASES}
    assert http_fields.answers() and settings.sampling()


VARIABLE = re.compile(
    r"environ(?:\.get\(|\[|\.setdefault\(|\.pop\()\"(\w+)\"|^_?[A-Z_]+ = \"(XINFER_JAX_\w+)\""
    r"|\b(HF_[A-Z_]+)\b|see (JAX_\w+)",
    re.MULTILINE,
)


@pytest.mark.unit
def test_every_environment_variable_of_the_code_is_described():
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "xinfer_jax").rglob("*.py")]
    read = {next(filter(None, found)) for text in sources for found in VARIABLE.findall(text)}
    assert len(read) > 7
    assert read <= {name for name, *_ in environment.VARIABLES}, read


def test_program_names_stale_tables(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text("<!-- table: environment -->\n<!-- end -->\n", encoding="utf-8")
    monkeypatch.setattr(make_tables, "ROOT", tmp_path)
    monkeypatch.setattr(make_tables, "CHECK", SimpleNamespace(value=True))
    assert make_tables.main([]) == 1
    assert capsys.readouterr().out == "page.md: environment is stale\n"
    monkeypatch.setattr(make_tables, "CHECK", SimpleNamespace(value=False))
    assert make_tables.main([]) == 0 and "`HF_TOKEN`" in page.read_text(encoding="utf-8")
    assert make_tables.main([]) == 0 and capsys.readouterr().out == "page.md: environment is written\n"
