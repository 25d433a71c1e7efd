"""Sampling settings that `test_settings.py` adds to a copy of the package, and a check of all places that
have them: `python toy_settings.py CHECKPOINT`. The copy is the package that it imports.
"""

import re
import sys
from pathlib import Path

# In the copy: an entry for each, a field for each, and one processor with its line in the table.
ENTRIES = """
    Setting("toy_boost", 0.0, _FRACTION, "Help of the boost.", hf="toy_boost", beams=False, processor="toy"),
    Setting("toy_places", 3, _COUNT, "Help of the places.", kind="count", other_name="toy_n", most=9),
    Setting("toy_switch", False, None, "Help of the switch.", kind="switch", hf="toy_switch"),
    Setting("toy_texts", False, None, "Help of the texts.", kind="texts", texts_for="toy_boost",
            default_texts=("th",)),
"""
NAMES = ("toy_boost", "toy_places", "toy_switch", "toy_texts")
PROCESSOR = '''
import jax.numpy as jnp


def toy(logits_BV, settings, context):
    """Raises the tokens with these texts by 1000 times the boost, and one more for each place."""
    more_B1 = (1000 * settings.toy_boost + settings.toy_places)[:, None]
    chosen_BV = settings.toy_texts & settings.toy_switch[:, None]
    return jnp.where(chosen_BV, logits_BV + more_B1, logits_BV)
'''


def add_to(package: Path) -> None:
    """Adds the settings to a copy of the package."""
    fields = "".join(f'    {name}: Any = unset("{name}")\n' for name in NAMES)
    insertions = {
        "sampling/settings.py": ('    Setting("logit_bias"', ENTRIES),
        "sampling/sampling_config.py": ("\n    @classmethod\n    def from_hf", fields),
        "plugins.py": ('    ("processor", "dry")', '    ("processor", "toy"): ("sampling.toy", "toy"),\n'),
    }
    for name, (before, text) in insertions.items():
        old = (package / name).read_text(encoding="utf-8")
        assert old.count(before) == 1
        (package / name).write_text(old.replace(before, text + before), encoding="utf-8")
    (package / "sampling" / "toy.py").write_text(PROCESSOR, encoding="utf-8")


def values(sampling):
    fields = ((name, getattr(sampling, name)) for name in NAMES)
    return {name: x.tolist() if hasattr(x, "tolist") else x for name, x in fields}


def given(boost=0.0, places=3, switch=False, texts=None):
    return dict(zip(NAMES, (boost, places, switch, texts), strict=True))


def listed(model, *texts):
    """Tokens with any of these texts."""
    decoded = [model.tokenizer.decode([i]) for i in range(model.config.vocab_size)]
    return [i for i, token in enumerate(decoded) if any(text in token for text in texts)]


def raises(message, call, *args, **options):
    try:
        call(*args, **options)
    except ValueError as error:
        assert re.search(message, str(error)), error
    else:
        raise AssertionError(message)


def check_bodies_and_rows(model) -> None:
    import numpy as np

    import xinfer_jax as xj
    from xinfer_jax.api.bodies import parse_request_body
    from xinfer_jax.sampling.batched_settings import select_rows, settings_per_row

    def parse(**body):
        default = xj.GenerateOptions(max_tokens=4)
        return parse_request_body(model, "plain", dict(prompt="Hi") | body, default, 99).options.sampling

    # Bodies: `toy_places` is nobody's field.
    wanted = parse(toy_boost=1, toy_n=2, toy_switch=True, toy_texts=["an", "in"])
    assert values(wanted) == given(1, 2, True, listed(model, "an", "in"))
    assert values(parse(temperature=1)) == values(parse(toy_places=1)) == given()
    assert values(parse(toy_boost=1))["toy_texts"] == listed(model, "th")
    for message, body in (
        (r"toy_boost must be from 0 \(off\) to 1", dict(toy_boost=2)),
        ("toy_n must be a whole number from 0 to 9", dict(toy_n=10)),
        ("toy_switch must be true or false", dict(toy_switch=1)),
        ("toy_texts must be a text or a list of texts", dict(toy_texts=[5])),
        ("toy_texts has 17 texts, more than the limit of 16", dict(toy_texts=["th"] * 17)),
        ("toy_texts: no token contains 'no token has this'", dict(toy_texts=["no token has this"])),
    ):
        raises(message, parse, **body)

    # Rows, and what the processor does to them.
    rows = settings_per_row([wanted, xj.SamplingConfig()], 2, model.config.vocab_size)
    dtypes = [(str(getattr(rows, name).dtype), getattr(rows, name).shape) for name in NAMES]
    assert dtypes == [
        ("float32", (2,)),
        ("int32", (2,)),
        ("bool", (2,)),
        ("bool", (2, model.config.vocab_size)),
    ]
    assert [getattr(rows, name).tolist() for name in NAMES[:3]] == [[1, 0], [2, 3], [True, False]]
    kept = select_rows(rows, np.array([False, True]))
    assert [getattr(kept, name).tolist() for name in NAMES[:3]] == [[0, 0], [3, 3], [False, False]]
    messages = (
        r"toy_boost must be from 0 \(off\) to 1, got",
        "toy_places must be a whole number",
        ".*true or false",
    )
    for message, name in zip(messages, NAMES, strict=False):
        raises(message, xj.SamplingConfig(**{name: [2.5, 1]}).validate)

    def tokens(sampling):
        options = xj.GenerateOptions(max_tokens=2, sampling=sampling)
        return xj.generate(model.params, model.config, [[5, 6], [5, 6]], options).tokens

    boosted, plain = tokens([wanted, xj.SamplingConfig()])
    assert [plain] * 2 == tokens(xj.SamplingConfig()) and {*boosted} <= {*listed(model, "an", "in")} - {
        *plain
    }


def check_flags_files_and_beams(model) -> None:
    import xinfer_jax as xj
    from xinfer_jax.cli import answer, answer_flags, batch_flags, chat_flags
    from xinfer_jax.serve import command

    # Flags.
    def flags(*of_command):
        answer_flags.PARSER.parse(["x", *of_command])
        return values(answer.sampling_from_flags(answer_flags.PARSER.values, model))

    found = flags("--toy_boost=0.5", "--toy_n=4", "--toy_switch", "--toy_texts=an", "--toy_texts=in")
    assert found == given(0.5, 4, True, listed(model, "an", "in"))
    assert flags("--toy_boost=1")["toy_texts"] == listed(model, "th") and flags() == given()
    raises(r".*--toy_boost=2: give a number from 0 \(off\) to 1", flags, "--toy_boost=2")
    raises(".*--toy_n=-1: give a whole number", flags, "--toy_n=-1")
    for parser in (module.PARSER for module in (answer_flags, batch_flags, chat_flags, command)):
        assert all(f"Help of the {x}." in parser._help() for x in ("boost", "places", "switch", "texts"))

    # generation_config.json, which knows two of them, and beams.
    from_hf = xj.SamplingConfig.from_hf
    assert values(from_hf(dict(toy_boost=0.5, toy_switch=True, toy_n=7))) == given(0.5, switch=True)
    raises("generation_config.json: toy_boost must be a number, got 'x'", from_hf, dict(toy_boost="x"))
    raises("generation_config.json: toy_switch must be true or false", from_hf, dict(toy_switch="x"))
    raises(r"toy_boost must be from 0 \(off\) to 1", from_hf, dict(toy_boost=2))
    beams = model.params, model.config, [5]
    raises(
        "toy_boost does not combine with beams: leave it out",
        xj.beam_search,
        *beams,
        sampling=xj.SamplingConfig(toy_boost=1.0),
    )
    xj.beam_search(*beams, max_tokens=2, sampling=xj.SamplingConfig(toy_switch=True))


if __name__ == "__main__":
    from xinfer_jax import load_model

    loaded = load_model(sys.argv[1])
    check_bodies_and_rows(loaded)
    check_flags_files_and_beams(loaded)
