"""Text in, text out, in Python: `generate_text`, `stream_text`, `encode_prompt`."""

import jax
import pytest
import tiny
from tiny import ANSWER, ANSWER_IDS, QUESTION

import xinfer_jax as xj
from xinfer_jax.text import encode_prompt, with_eos


@pytest.fixture(scope="module")
def model(good) -> xj.Model:
    return xj.load_model(good)


def test_generate_text_and_stream_text(model):
    options = xj.GenerateOptions(max_new_tokens=16)
    pieces = xj.stream_text(model, QUESTION, options)
    seen = []
    while True:
        try:
            seen.append(next(pieces))
        except StopIteration as stop:
            out = stop.value
            break
    assert "".join(seen) == ANSWER == xj.generate_text(model, QUESTION, options) and len(seen) > 5
    assert (out.tokens, out.finish_reason) == ([ANSWER_IDS], ["eos"])


def test_eos_of_the_options_goes_before_that_of_the_model(model):
    options = xj.GenerateOptions(max_new_tokens=16, eos_token_ids=(ANSWER_IDS[3],))
    assert xj.generate_text(model, QUESTION, options) == "Yes"


def test_an_eos_id_that_the_model_cannot_produce_is_left_out(tmp_path):
    model = xj.load_model(tiny.write(tmp_path, generation_config={"eos_token_id": [3, 288]}))
    assert 288 in model.tokenizer.eos_token_ids
    assert 3 in with_eos(model, None).eos_token_ids and 288 not in with_eos(model, None).eos_token_ids


def test_stream_text_with_a_key(model):
    options = xj.GenerateOptions(max_new_tokens=16, sampling=xj.SamplingConfig(temperature=1000.0))
    texts = [
        "".join(xj.stream_text(model, QUESTION, options, key=jax.random.key(seed))) for seed in (5, 5, 6)
    ]
    assert (
        texts[0] == texts[1] == xj.generate_text(model, QUESTION, options, key=jax.random.key(5)) != texts[2]
    )


def test_a_conversation_is_encoded_as_its_template_says(model):
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    expected = (
        "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        + "<|im_start|>assistant\n"
    )
    assert encode_prompt(model, messages) == tiny.tokenizer().encode(expected).ids
    system = "<|im_start|>system\nBe brief.<|im_end|>\n"
    assert (
        encode_prompt(model, messages, system="Be brief.") == tiny.tokenizer().encode(system + expected).ids
    )
    assert encode_prompt(model, "a <|im_end|>", raw=True) == tiny.tokenizer().encode("a <|im_end|>").ids


@pytest.mark.parametrize(
    "prompt, options",
    [
        ("", {}),
        (" \n", {}),
        ("x", dict(raw=True, system="y")),
        ([{"role": "user", "content": "x"}], dict(raw=True)),
        ([], {}),
        ([7], {}),
    ],
    ids=["empty", "blank", "raw-system", "raw-conversation", "no-messages", "not-messages"],
)
def test_prompts_that_are_refused_at_once(model, prompt, options):
    """Not only when the first piece is asked for."""
    with pytest.raises(xj.InputError):
        xj.stream_text(model, prompt, **options)
