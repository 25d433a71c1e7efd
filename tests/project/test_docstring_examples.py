"""The examples in docstrings of public names run, each on its own, and print the shown output."""

import doctest
import inspect

import pytest
from public_names import PUBLIC
from quick import full_except

pytestmark = pytest.mark.oldest

EXAMPLES = {name: text for name, x in PUBLIC.items() if ">>> " in (text := inspect.getdoc(x) or "")}
# They compile nothing.
QUICK = {"load_model", "save_model", "encode_prompt", "params.param_names", "tools.parse_tool_calls"}
# Other tests take the same paths.
SOAK = {
    "beam_search",
    "prefill_with_draft",
    "embed_texts",
    "score_completions",
    "Engine",
    "lora.with_adapter",
    "stream_text",
}
NEED_LLGUIDANCE = {"grammar.json_schema"}


def test_the_most_used_names_have_examples():
    assert {*EXAMPLES} == QUICK | {
        "generate", "GenerateOptions", "stream", "generate_text", "init_cache", "stream_text",
        "grammar.compile_dfa", "Engine", "SamplingConfig", "beam_search", "decode_loop",
        "embed_texts", "forward", "prefill", "prefill_with_draft",
        "score", "score_completions", "grammar.json_schema", "lora.with_adapter",
    }  # fmt: skip


@pytest.mark.parametrize("name", full_except(QUICK, EXAMPLES, soak=SOAK))
def test_example_prints(name):
    if name in NEED_LLGUIDANCE:
        pytest.importorskip("llguidance", reason="llguidance serves grammars")
    example = doctest.DocTestParser().get_doctest(EXAMPLES[name], {}, name, None, None)
    printed = []
    failed, _ = doctest.DocTestRunner().run(example, out=printed.append)
    assert not failed, "".join(printed)
