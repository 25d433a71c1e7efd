"""Sampling settings that `test_settings.py` adds to a copy of the package, and a look for them in all places:
`python toy_settings.py CHECKPOINT` prints a line of JSON. The copy is the package that it imports.
"""

import json
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


def main(checkpoint: str) -> None:
    import numpy as np

    import xinfer_jax as xj
    from xinfer_jax.api.bodies import parse_request_body
    from xinfer_jax.api.fields import BodyError
    from xinfer_jax.cli import answer, answer_flags, batch_flags, chat_flags
    from xinfer_jax.sampling.batched_settings import select_rows, settings_per_row
    from xinfer_jax.serve import command

    model = xj.load_model(checkpoint)

    def values(sampling):
        fields = ((name, getattr(sampling, name)) for name in NAMES)
        return {name: x.tolist() if isinstance(x, np.ndarray) else x for name, x in fields}

    def parse(**body):
        options = parse_request_body(
            model, "plain", dict(prompt="Hi") | body, xj.GenerateOptions(4), 99
        ).options
        return options.sampling

    def error(call, *args, **options):
        try:
            call(*args, **options)
        except BodyError as error:
            return f"{error.param}: {error}"
        except xj.InputError as error:
            return str(error)

    def flags(*given):
        answer_flags.PARSER.parse(["x", *given])
        return values(answer.sampling_from_flags(answer_flags.PARSER.values, model))

    def tokens(sampling):
        return xj.generate(
            model.params, model.config, [[5, 6], [5, 6]], xj.GenerateOptions(2, sampling=sampling)
        ).tokens

    body = dict(toy_boost=1, toy_n=2, toy_switch=True, toy_texts=["an", "in"])
    given = parse(**body)
    plain = settings_per_row([given, xj.SamplingConfig()], 2, model.config.vocab_size)
    kept = select_rows(plain, np.array([False, True]))
    parsers = [module.PARSER for module in (answer_flags, batch_flags, chat_flags, command)]
    print(json.dumps(dict(
        body=values(given),
        default_texts=values(parse(toy_boost=1))["toy_texts"],
        off=values(parse(temperature=1)),
        rows={name: [str(getattr(plain, name).dtype), list(getattr(plain, name).shape)] for name in NAMES},
        row_values=[getattr(plain, name).tolist() for name in NAMES[:3]],
        kept=[getattr(kept, name).tolist() for name in NAMES[:3]],
        body_errors=[error(parse, **bad) for bad in (
            dict(toy_boost=2), dict(toy_n=10), dict(toy_switch=1), dict(toy_texts=[5]),
            dict(toy_texts=["th"] * 17), dict(toy_texts=["no token has this"]), dict(toy_places=1),
        )],
        row_errors=[error(xj.SamplingConfig(**{name: [2.5, 1]}).validate) for name in NAMES[:3]],
        flags=flags("--toy_boost=0.5", "--toy_n=4", "--toy_switch", "--toy_texts=an", "--toy_texts=in"),
        default_flags=flags("--toy_boost=1")["toy_texts"],
        no_flags=flags(),
        flag_errors=[error(flags, bad) for bad in ("--toy_boost=2", "--toy_n=-1", "--toy_switch=5")],
        help=[all(f"Help of the {name}." in parser._help() for name in ("boost", "places", "switch", "texts"))
              for parser in parsers],
        generation_config=values(xj.SamplingConfig.from_hf(dict(toy_boost=0.5, toy_switch=True, toy_n=7))),
        generation_errors=[error(xj.SamplingConfig.from_hf, bad)
                           for bad in (dict(toy_boost="x"), dict(toy_switch="x"), dict(toy_boost=2))],
        beams=error(xj.beam_search, model.params, model.config, [5], sampling=given),
        some_beams=error(xj.beam_search, model.params, model.config, [5], max_new_tokens=2,
                         sampling=xj.SamplingConfig(toy_switch=True)),
        tokens=tokens([given, xj.SamplingConfig()]),
        plain_tokens=tokens(xj.SamplingConfig()),
    )))  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1])
