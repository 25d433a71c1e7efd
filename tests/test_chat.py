"""xinfer-jax-chat: turns on a cache that is kept, what it refuses, and Ctrl-C."""

import io
import re
import signal
import sys
import time

import pytest
import tiny
from test_cli_process import Session, environment  # noqa: F401
from tiny import ANSWER, QUESTION

from xinfer_jax.cli import chat_flags as chat


@pytest.fixture
def talk(capsys, monkeypatch, good):
    """Runs the command in this process: (exit code, standard output, standard error)."""

    def run(said: str, *flags: str, model=good) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(said))
        with pytest.raises(SystemExit) as caught:
            chat.main(
                ["xinfer-jax-chat", "--compilation_cache=", "--max_tokens=16", f"--model={model}", *flags]
            )
        return (caught.value.code, *capsys.readouterr())

    return run


def test_talk(talk):
    said = f"{QUESTION}\n" * 4 + f"/nonsense\n{'x' * 200}\n/reset\n{QUESTION}\n/exit\n{QUESTION}\n"
    code, out, err = talk(said, "--stats", "--capacity=150")
    lines = out.splitlines()
    assert code == 0 and [line for line in lines if line == ANSWER] == [ANSWER] * 5
    assert lines[0] == lines[-2] == ANSWER, "forgotten means as at first"
    costs = [
        re.match(r"\[(\d+) of (\d+) tokens read in \d+ ms, \d+ written .*, eos\]", line) for line in lines
    ]
    read, held = zip(*(map(int, cost.groups()) for cost in costs if cost), strict=True)
    assert read[0] == held[0] == read[-1] == held[-1] and read[1] < held[1] / 2
    assert any("earliest exchanges no longer fit in 150 tokens" in line for line in lines)
    assert "/nonsense: there are /exit, /reset and /stats" in lines
    # What cannot be answered is one line, and the talk goes on.
    assert re.fullmatch("xinfer-jax-chat: too long: a question of .* --capacity\n", err)


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--capacity=20", "--max_tokens=30"], "--max_tokens=30 leaves no room for a question"),
        (["--capacity=1"], "--capacity=1: give a whole number from 2"),
        (["--max_tokens=300"], "--max_tokens=300 leaves no room for a question in a capacity of 256"),
        (["--temperature=-1"], "--temperature=-1: give a number of 0 or above"),
        (["--prompt=x"], "Unknown command line flag 'prompt'"),
        (["--model=/nowhere"], "model '/nowhere' is neither"),
    ],
)
def test_refused(talk, flags, said):
    code, out, err = talk(f"{QUESTION}\n", *flags)
    assert (code, out, err.count("\n")) == (2, "", 1) and said in err and err.startswith("xinfer-jax-chat: ")


def test_a_template_that_refuses_a_turn(talk, tmp_path):
    """It says so, and the talk goes on."""
    tiny.write(tmp_path, tiny.CONFIG)
    template = "{{ raise_exception('no\nsuch words') }}"
    tiny.write_json(tmp_path / "tokenizer_config.json", {"chat_template": template})
    code, out, err = talk("hello\nagain\n", model=tmp_path)
    assert (code, out) == (0, "")
    assert [bool(re.match("xinfer-jax-chat: .*no such words", line)) for line in err.splitlines()] == [
        True
    ] * 2


def test_interrupts(environment, good):  # noqa: F811
    """The first stops an answer, of which what was said counts; at the prompt it ends the talk."""
    session = Session(environment, "scripts/chat.py", f"--model={good}", "--stats",
                      "--max_tokens=16",
                      "--compilation_cache=")  # fmt: skip
    output = session.process.stdout
    session.type(f"{QUESTION} " * 4)  # longer than what was compiled at the start
    session.until("reading the prompt")
    session.process.send_signal(signal.SIGINT)
    assert re.fullmatch(rb"> .+\n", output.readline()) and output.readline().endswith(b", stop]\n")
    session.type(QUESTION)
    assert output.readline() == f"> {ANSWER}\n".encode() and output.readline().endswith(b", eos]\n")
    assert output.read(2) == b"> "
    code, out, err = session.interrupted()
    assert (code, out) == (130, "") and "Traceback" not in err


def test_a_second_interrupt_ends_the_talk(environment, good):  # noqa: F811
    session = Session(
        environment, "scripts/chat.py", f"--model={good}", "--max_tokens=16", "--compilation_cache="
    )
    session.type(f"{QUESTION} " * 4)  # longer than what was compiled at the start
    session.until("reading the prompt")
    session.process.send_signal(signal.SIGINT)
    time.sleep(0.3)  # two at once would be one
    code, _, err = session.interrupted()
    assert code == 130 and "Traceback" not in err
