"""xinfer-jax-chat: turns that reuse the cache, errors, and Ctrl-C."""

import io
import re
import signal
import sys

import pytest
import tiny
from test_cli_process import Session, environment  # noqa: F401
from tiny import ANSWER, QUESTION

from xinfer_jax.cli import chat_flags as chat

pytestmark = pytest.mark.oldest


@pytest.fixture
def run_chat(capsys, monkeypatch, good):
    """Runs the command in this process: (exit code, standard output, standard error)."""

    def run(lines: str, *flags: str, model=good) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        with pytest.raises(SystemExit) as caught:
            chat.main(
                ["xinfer-jax-chat", "--compilation_cache=", "--max_tokens=16", f"--model={model}", *flags]
            )
        return (caught.value.code, *capsys.readouterr())

    return run


@pytest.mark.full
def test_a_chat_prefills_only_new_turns(run_chat):
    questions = f"{QUESTION}\n" * 4 + f"/nonsense\n{'x' * 200}\n/reset\n{QUESTION}\n/exit\n{QUESTION}\n"
    code, out, err = run_chat(questions, "--stats", "--capacity=150")
    lines = out.splitlines()
    assert code == 0 and [line for line in lines if line == ANSWER] == [ANSWER] * 5
    assert lines[0] == lines[-2] == ANSWER, "after /reset the first question has its first answer"
    costs = [
        re.match(r"\[prefilled (\d+) of (\d+) tokens in \d+ ms, generated \d+ .*, stop\]", line)
        for line in lines
    ]
    prefilled, total = zip(*(map(int, cost.groups()) for cost in costs if cost), strict=True)
    assert prefilled[0] == total[0] == prefilled[-1] == total[-1] and prefilled[1] < total[1] / 2
    assert any("earliest exchanges: the chat exceeds 150 tokens" in line for line in lines)
    assert "/nonsense: there are /exit, /reset and /stats" in lines
    # A question that cannot be answered gives one line, and the chat continues.
    assert re.fullmatch("xinfer-jax-chat: a question of .* tokens: see --capacity\n", err)


@pytest.mark.parametrize(
    "flags, error",
    [
        (["--capacity=20", "--max_tokens=30"], "--max_tokens=30 leaves no tokens for a question"),
        (["--max_tokens=300"], "--max_tokens=300 leaves no tokens for a question in a capacity of 256"),
        (["--adapter=/nowhere"], "adapter '/nowhere' does not exist: give a directory, or a hub name"),
        (["--regex=a", "--choice=b"], "--regex and --choice both constrain the answer"),
        (["--prompt=x"], "Unknown command line flag 'prompt'"),
        (["--model=/nowhere"], "model '/nowhere' does not exist"),
    ],
)
def test_bad_flags_of_chat_exit_with_one_line(run_chat, flags, error):
    code, out, err = run_chat(f"{QUESTION}\n", *flags)
    assert (code, out, err.count("\n")) == (2, "", 1) and error in err and err.startswith("xinfer-jax-chat: ")


def test_a_chat_without_the_defaults_of_the_checkpoint(run_chat, tmp_path):
    tiny.write(tmp_path, generation_config=dict(num_beams=4))
    code, _, err = run_chat("hello\n", model=tmp_path)
    assert code == 2 and "(--nogeneration_config)" in err
    assert run_chat("hello\n", "--nogeneration_config", "--max_tokens=1", model=tmp_path)[0] == 0


def test_a_question_that_the_template_rejects_is_one_line(run_chat, tmp_path):
    """The error is one line, and the chat continues."""
    tiny.write(tmp_path, tiny.CONFIG)
    template = "{{ raise_exception('no\nsuch words') }}"
    tiny.write_json(tmp_path / "tokenizer_config.json", {"chat_template": template})
    code, out, err = run_chat("hello\nagain\n", model=tmp_path)
    assert (code, out, err.count("\n")) == (0, "", 2)
    assert all(re.match("xinfer-jax-chat: .*no such words", line) for line in err.splitlines())


def test_the_answers_of_a_chat_follow_a_grammar(run_chat):
    code, out, err = run_chat(f"{QUESTION}\n", "--choice=no idea", "--max_tokens=32")
    assert (code, out, err) == (0, "no idea\n", "")


@pytest.mark.full
def test_a_line_is_edited_and_the_terminal_is_given_back(environment, good):  # noqa: F811
    session = Session(
        environment, "scripts/chat.py", f"--model={good}", "--max_tokens=16", "--compilation_cache=",
        terminal=True,
    )  # fmt: skip
    session.until("> ")
    session.type(f"{QUESTION}x\x7f")  # the last letter is erased
    assert ANSWER in session.until("> ")
    session.type("\x1b[A")  # arrow up: the question again
    assert ANSWER in session.until("> ")
    assert session.terminal_settings() != session.settings
    assert session.interrupted()[0] == 130
    assert session.terminal_settings() == session.settings


@pytest.mark.full
def test_ctrl_c_stops_an_answer_then_the_chat(environment, good):  # noqa: F811
    """The first Ctrl-C stops an answer, whose text stays in the chat. At the prompt it ends the chat."""
    session = Session(environment, "scripts/chat.py", f"--model={good}", "--stats",
                      "--max_tokens=16",
                      "--compilation_cache=")  # fmt: skip
    output = session.process.stdout
    session.type(f"{QUESTION} " * 4)  # longer than what was compiled at the start
    session.until("prefilling the prompt")
    session.process.send_signal(signal.SIGINT)
    assert re.fullmatch(rb"> .+\n", output.readline()) and output.readline().endswith(b", abort]\n")
    session.type(QUESTION)
    assert output.readline() == f"> {ANSWER}\n".encode() and output.readline().endswith(b", stop]\n")
    assert output.read(2) == b"> "
    code, out, err = session.interrupted()
    assert (code, out) == (130, "") and "Traceback" not in err
