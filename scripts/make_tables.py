"""Writes the tables of the documentation that follow from code, data and tests.

A table stands between `<!-- table: NAME -->` and `<!-- end -->` in a Markdown file. Change the code, then run

    python scripts/make_tables.py            # writes all tables
    python scripts/make_tables.py --check    # changes nothing, and exits with 1 if a table is stale

The program needs what the tests need (`pip install -e '.[test]'`), and half a minute.
"""

from launcher import InputError, start

# isort: split
import functools
import os
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"  # nothing runs on a device

from absl import flags
from tables import cards, environment, families, http_fields, markdown, metrics, settings

CHECK = flags.DEFINE_bool("check", False, "Write nothing, and name the tables that are stale.")
ROOT = Path(__file__).resolve().parents[1]
TABLES: markdown.Tables = {
    name: functools.cache(make)
    for name, make in {
        "families": families.families,
        "formats-of-families": families.formats,
        "features-of-families": families.features,
        "memory-of-models": cards.memory,
        "models-on-cards": cards.fits,
        "models-on-24-gb": cards.fit_24_gb,
        "cards": cards.cards,
        "sampling-settings": settings.sampling,
        "engine-options": settings.engine_options,
        **{f"serve-{name}": functools.partial(settings.flags_of, x) for name, x in settings.GROUPS.items()},
        "environment": environment.variables,
        "endpoints": http_fields.endpoints,
        "fields-of-answers": http_fields.answers,
        "fields-without-effect": http_fields.without_effect,
        "fields-not-served": http_fields.not_served,
        "fields-of-other-servers": http_fields.of_other_servers,
        "fields-of-penalties": http_fields.of_penalties,
        "fields-of-responses": http_fields.responses,
        "fields-of-endpoints": http_fields.other_endpoints,
        "metrics": metrics.metrics,
    }.items()
}


def main(argv: list[str]) -> int:
    found = 0
    for path in markdown.pages(ROOT):
        text = path.read_text(encoding="utf-8")
        try:
            stale = markdown.stale_blocks(text, TABLES)
        except InputError as error:
            raise InputError(f"{path.relative_to(ROOT)}: {error}") from error
        for name in stale:
            print(f"{path.relative_to(ROOT)}: {name} {'is stale' if CHECK.value else 'is written'}")
        found += len(stale)
        if stale and not CHECK.value:
            path.write_text(markdown.with_new_blocks(text, TABLES), encoding="utf-8")
    return int(CHECK.value and found > 0)


if __name__ == "__main__":
    start(main)
