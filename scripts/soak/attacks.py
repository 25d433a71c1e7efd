"""The attacks of soak_serve.py --attacks: their requests, and the process that sends them.

`python attacks.py JOB`. JOB is JSON: the name of an attack, a port of 127.0.0.1, the context of the server in
tokens, headers, and a time limit in seconds. The process builds its requests and prints "ready". It starts at
a line on standard input and stops at the next one. Its last line counts the statuses. It never sends more
than `MOST_REQUESTS`.
"""

import dataclasses
import http.client
import json
import os
import random
import select
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from soak import hostile_adapters, hostile_grammars, senders
from soak.senders import HOST, Target, hold, post, post_as_admin, post_as_user, send_and_disconnect

MOST_REQUESTS = 20_000
PAUSE = 1.0  # seconds before the next request of a worker whose last one was rejected
COMPLETIONS = "/v1/completions"
CALL = dict(prompt="What is the capital of France?", max_tokens=16, ignore_eos=True, temperature=0)
Call = Callable[[int], tuple[str, dict[str, Any]]]  # path and body of a call, by its number
CHAT = "/v1/chat/completions"
LARGEST = 2**22 - 64  # bytes, just below the limit of every body
RawRequest = tuple[str, bytes]  # path and body


@dataclasses.dataclass
class Attack:
    """One way to slow down a server."""

    what: str
    workers: int  # threads of the attacker, each with a connection
    # From the context length to chains of requests. Worker i uses chain i modulo the number of chains. It
    # repeats a request, and goes on to the next one after 400 or 413.
    chains: Callable[[int], list[list[RawRequest]]]
    send: Callable[[Target, str, bytes], str] = post
    flags: tuple[str, ...] = ()  # of the server
    files: int | None = None  # limit of the server's open files; None: that of the system
    keyed: bool = False  # the second client has an API key; the attacker has none
    growth: int = 200  # limit of the growth of memory, in MiB
    rotates: bool = False  # a worker goes on to the next request after every answer
    clients: int = 1  # addresses from which the workers connect in turn
    reranker: bool = False  # the server has a model whose yes and no are one token each
    call: Call = lambda _: (COMPLETIONS, CALL)  # of the second client, by its number
    # Writes files of the attack into a folder, and returns further flags of the server.
    prepare: Callable[[Path], tuple[str, ...]] | None = None


def _body(**fields: Any) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


def _completion(**fields: Any) -> RawRequest:
    return COMPLETIONS, _body(**fields)


def _prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(1900) for _ in range(length)] for _ in range(count)]


def _filled(size: int, head: str, unit: str, tail: str) -> bytes:
    """Returns a body of at most `size` bytes: head, as many units as fit, tail."""
    return (head + unit * ((size - len(head) - len(tail)) // len(unit)) + tail).encode()


def _shrinking(path: str, named_size: int, head: str, unit: str, tail: str, context: int) -> list[RawRequest]:
    """Bodies of the size that names the attack, and just below each of the two limits of a body."""
    sizes = [named_size, *(size for size in (LARGEST, 64 * context - 64) if size < named_size)]
    return [(path, _filled(size, head, unit, tail)) for size in sizes]


def _flood(_: int) -> list[list[RawRequest]]:
    return [[_completion(prompt=row, max_tokens=200, ignore_eos=True)] for row in _prompts(500, 50)]


def _echo(count: int, length: int, _: int) -> list[list[RawRequest]]:
    """`count` prompts, and as many as two bodies of one client may have."""
    fields = dict(max_tokens=0, echo=True, logprobs=1)
    sizes = (count, min(count, 120))
    return [
        [_completion(prompt=_prompts(size, length, seed), **fields) for size in sizes] for seed in range(2)
    ]


def _prompt_logprobs(context: int) -> list[list[RawRequest]]:
    """A long prompt is returned with 20 alternatives in each of 128 answers, and of 4 answers. It is also
    streamed.
    """
    row = _prompts(1, context - 100)[0]
    fields = dict(prompt=row, max_tokens=1, echo=True, logprobs=20)
    return [[_completion(n=n, stream=stream, **fields) for n in (128, 4)] for stream in (False, True)]


def _embeddings(context: int) -> list[list[RawRequest]]:
    """Texts of all lengths, and 2,048 texts of one id."""
    rows = [_prompts(8, length, length) for length in (5, 50, 500, context - 50)]
    bodies = [[[5]] * 2048, *rows]
    return [[("/v1/embeddings", _body(input=texts))] for texts in bodies]


def _rerank(context: int) -> list[list[RawRequest]]:
    """A query that fills the context is sent with 2,048 documents of a letter, or with 40. A small query is
    sent with 120.
    """
    bodies = []
    most = context - 200
    for words, count, document in ((most, 2048, "a"), (most, 2048, "a " * 40), (200, 120, "a")):
        bodies.append(("/v1/rerank", _body(query="the " * words, documents=[document] * count)))
    return [bodies, bodies[1:]]


def _answers(_: int) -> list[list[RawRequest]]:
    """A client asks for 128 long answers to one prompt, and for 8 × 128 answers of which 8 are returned. It
    asks for fewer after a rejection.
    """
    common = dict(temperature=1.0, ignore_eos=True)
    chains = []
    for i in range(64):
        many = dict(prompt=_prompts(1, 20, i)[0], max_tokens=900, **common)
        best = dict(prompt=_prompts(8, 20, i), max_tokens=64, n=1, **common)
        if i % 2:
            sizes = [many | dict(n=n) for n in (128, 32, 8)]
        else:
            sizes = [best | dict(best_of=n) for n in (128, 32, 8)]
        chains.append([_completion(**size) for size in sizes])
    return chains


def _stop(context: int) -> list[list[RawRequest]]:
    """300,000 strings, as many as fit into a body, and the longest allowed ones."""
    start = '{"prompt":"Hello","max_tokens":200,"ignore_eos":true,"stop":['
    some = ",".join(f'"{i:06d}"' for i in range(300_000))
    sizes = [some, some[: 9 * ((64 * context - 200) // 9) - 1]]
    sizes.append(",".join(f'"{i:02d}{"é" * 250}"' for i in range(64)))
    return [[(COMPLETIONS, f"{start}{size}]}}".encode()) for size in sizes]]


def _brackets(context: int) -> list[list[RawRequest]]:
    """Empty lists in a field, empty prompts, and nested lists."""
    flat = partial(_shrinking, named_size=2**24 - 64, unit="[],", tail="[]]}", context=context)
    deep = [(COMPLETIONS, b"[" * size) for size in (2**24 - 64, LARGEST, 64 * context - 64)]
    fields = flat(COMPLETIONS, head='{"prompt":"a","metadata":[')
    return [fields, flat(COMPLETIONS, head='{"prompt":['), deep, flat(CHAT, head='{"messages":[')]


def _allowed(_: int) -> list[list[RawRequest]]:
    """2,000,000 ids for 1,024 prompts, as many as fit into a body, and as many as the vocabulary has."""
    chain = []
    for count, size in ((1024, 4_010_000), (1024, LARGEST), (1024, 64_000), (120, 4_000)):
        head = f'{{"prompt":[{",".join(["[1]"] * count)}],"max_tokens":1,"allowed_token_ids":['
        chain.append((COMPLETIONS, _filled(size, head, "7,", "7]}")))
    return [chain]


def _logprobs(count: int, _: int, **fields: Any) -> list[list[RawRequest]]:
    fields |= dict(logprobs=20, temperature=1.0, ignore_eos=True)
    return [[_completion(prompt=row, **fields)] for row in _prompts(count, 20)]


def _ids(path: str, field: str, named_size: int, unit: str, context: int) -> list[list[RawRequest]]:
    return [_shrinking(path, named_size, f'{{"{field}":[', unit, f"{unit[:-1]}]}}", context)]


def _tokenize(context: int) -> list[list[RawRequest]]:
    sizes = _shrinking("/tokenize", 2**20, '{"prompt":"', "word ", '"}', context)
    return [sizes, _shrinking("/tokenize", 2**20, '{"prompt":"', "a", '"}', context)]


def _messages(count: int, context: int) -> list[list[RawRequest]]:
    """`count` messages of one letter, as many as fit into a body, and as many as the context has tokens."""
    unit = '{"role":"user","content":"a"},'
    sizes = _shrinking(CHAT, count * len(unit), '{"messages":[', unit, f"{unit[:-1]}]}}", context)
    few = _filled(len(unit) * (context - 48), '{"max_tokens":1,"messages":[', unit, f"{unit[:-1]}]}}")
    return [[*sizes, (CHAT, few)]]


def _messages_and_empty(context: int) -> list[list[RawRequest]]:
    """Many messages, and empty ones that fill 16 MB."""
    empty = _shrinking(CHAT, 16_000_000, '{"messages":[', "{},", "{}]}", context)
    return [*_messages(400_000, context), empty]


def _long_prompts(context: int) -> list[list[RawRequest]]:
    """A prompt that is too long, and 1,024 prompts of the largest length."""
    start = '{"max_tokens":1,"prompt":'
    unit = f'"{"word " * (context * 2 // 5)}",'
    rows = f"{start}[{unit * min(1024, (LARGEST - 100) // len(unit))}{unit[:-1]}]}}".replace(unit, "", 1)
    sizes = _shrinking(COMPLETIONS, 16_000_000, f'{start}"', "word ", '"}', context)
    return [sizes, [(COMPLETIONS, rows.encode())]]


def _biases(_: int) -> list[list[RawRequest]]:
    """1,024 prompts, and as many as 64 bodies of one client may have."""
    rows = [[i] for i in range(1024)]
    bias = {str(i): 1.5 for i in range(300)}
    fields = dict(max_tokens=16, logit_bias=bias, ignore_eos=True)
    return [[_completion(prompt=rows[:count], **fields) for count in (1024, 4)]]


def _storm(_: int) -> list[list[RawRequest]]:
    bodies = [dict(prompt=row, max_tokens=400, ignore_eos=True) for row in _prompts(16, 300)]
    return [[_completion(**body, stream=i % 2 == 0, n=1 + i % 8)] for i, body in enumerate(bodies)]


def _long_answers(context: int) -> list[list[RawRequest]]:
    """Several clients ask for answers as long as the context."""
    fields = dict(max_tokens=context - 58, ignore_eos=True)
    rows = enumerate(_prompts(16, 50))
    return [[_completion(prompt=row, user=f"10.0.0.{i}", **fields)] for i, row in rows]


def _half_letters(context: int) -> list[list[RawRequest]]:
    """Answers that never complete a character, and answers without repeated 400-grams."""
    common = dict(max_tokens=context - 100, ignore_eos=True, stop=["never"], stream=True)
    half = dict(common, allowed_token_ids=[172])  # the first byte of a character of four bytes
    grams = dict(common, no_repeat_ngram_size=400, allowed_token_ids=[100, 101])
    return [[_completion(prompt="Hello", **body)] for body in (half, grams)]


def _grammars(_: int) -> list[list[RawRequest]]:
    """Six chains through all hostile grammars, each from another one on."""
    found = [*hostile_grammars.named().values(), *hostile_grammars.corpus()]
    bodies = [_completion(prompt="a", max_tokens=1, **{field: value}) for field, value in found]
    return [bodies[at:] + bodies[:at] for at in range(0, 6 * 35, 35)]


def _compiles(_: int) -> list[list[RawRequest]]:
    """Schemas compile without end. None is sent twice."""
    schemas = [dict(type="integer", multipleOf=9699690 + i) for i in range(360)]
    bodies = [_completion(prompt="a", max_tokens=9, guided_json=schema) for schema in schemas]
    return [bodies[i::6] for i in range(6)]


def _grammar_call(number: int) -> tuple[str, dict[str, Any]]:
    """A grammar that needs masks of the host, and another one for each call, though all allow the same."""
    grammar = f'start: (/[a-z ]+/ | "(" start ")")+ // {number}'
    return COMPLETIONS, CALL | dict(guided_grammar=grammar, ignore_eos=False)


def _breakers(_: int) -> list[list[RawRequest]]:
    """Sets of 16 sequence breakers of DRY are sent. None is sent twice."""
    draw = random.Random(0)
    sets = [draw.sample("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ", 16) for _ in range(1600)]
    fields = dict(prompt="a", max_tokens=1, dry_multiplier=0.8)
    bodies = [_completion(dry_sequence_breakers=texts, **fields) for texts in sets]
    return [bodies[i::8] for i in range(8)]


def _ambiguous(_: int) -> list[list[RawRequest]]:
    fields = dict(prompt="a", max_tokens=500, guided_grammar=hostile_grammars.AMBIGUOUS, stream=True)
    return [[_completion(**fields)]]


def _adapters(_: int) -> list[list[RawRequest]]:
    """All hostile adapters, each worker from another one on."""
    names = hostile_adapters.NAMES
    load = "/v1/load_lora_adapter"
    bodies = [(load, _body(lora_name=name, lora_path=name, load_inplace=True)) for name in names]
    return [bodies[at:] + bodies[:at] for at in range(len(bodies))]


def _same(path: str, *bodies: bytes) -> Callable[[int], list[list[RawRequest]]]:
    return lambda _: [[(path, body)] for body in bodies]


_UNLIMITED = (
    "--max_waiting=100000", "--max_waiting_per_client=100000", "--max_waiting_tokens=1000000000",
    "--max_waiting_tokens_per_client=1000000000",
)  # fmt: skip
_VECTOR = ("/v1/embeddings", dict(input="What is the capital of France?"))
ATTACKS = dict(
    flood=Attack("500 requests of 200 tokens", 500, _flood, flags=_UNLIMITED),
    echo=Attack(
        "1,024 prompts of 500 ids, echo, logprobs, no answer", 2, partial(_echo, 1024, 500), flags=_UNLIMITED
    ),
    echo_leave=Attack(
        "the same, and the client disconnects", 2, partial(_echo, 1024, 500),
        partial(send_and_disconnect, least=1, most=2),
    ),
    long=Attack("100 prompts of 900 ids, echo, logprobs, no answer", 2, partial(_echo, 100, 900)),
    shown=Attack("echo of a prompt of 1,900 ids with n=128 answers × 20 alternatives", 8, _prompt_logprobs),
    rerank=Attack(
        "a query of 1,848 words × 2,048 documents × 4", 4, _rerank, clients=4, reranker=True,
        call=lambda _: _VECTOR,
    ),
    rerank_leave=Attack(
        "the same, and the client disconnects", 4, _rerank,
        partial(send_and_disconnect, least=0.1, most=0.5), clients=4, reranker=True, call=lambda _: _VECTOR,
    ),
    vectors=Attack("/v1/embeddings of all lengths × 64", 64, _embeddings),
    answers=Attack("64 bodies of n=128 × 900 tokens, 8 prompts × best_of=128", 64, _answers),
    stop=Attack("300,000 stop strings", 8, _stop),
    brackets=Attack("16 MiB of brackets", 4, _brackets),
    allowed=Attack("2,000,000 allowed_token_ids, 1,024 prompts", 2, _allowed),
    logprobs=Attack("n=32 × 450 tokens × 20 alternatives", 4, partial(_logprobs, 4, max_tokens=450, n=32)),
    detokenize=Attack(
        "/detokenize of 14 MiB", 4, partial(_ids, "/detokenize", "tokens", 14 * 2**20, "1,")
    ),
    tokenize=Attack("/tokenize of 1 MiB × 10", 10, _tokenize),
    messages=Attack("400,000 messages of one letter × 8", 8, partial(_messages, 400_000)),
    beside=Attack("6 of them and 6 × 16 MB of {}", 12, _messages_and_empty),
    template=Attack("5,000 messages × 8", 8, partial(_messages, 5000)),
    prompts=Attack("prompts of 16 MB × 8, with 1,023 of 4 kB", 8, _long_prompts),
    unread_ids=Attack(
        "3.6 MB to /detokenize × 8, unread", 8,
        partial(_ids, "/detokenize", "tokens", 3_600_000, "1234,"), hold,
    ),
    unread_streams=Attack(
        "8 streams of 8 × 400 tokens × 20 alternatives, unread", 8,
        partial(_logprobs, 8, max_tokens=400, n=8, stream=True), hold,
    ),
    biases=Attack("64 bodies of 1,024 prompts with logit_bias", 64, _biases),
    storm=Attack(
        "16 clients that disconnect within 0.3 s, a deadline of 2 s", 16, _storm,
        partial(send_and_disconnect, least=0.0, most=0.3), flags=("--deadline=2",),
    ),
    crowd=Attack(
        "200 clients, of which three in ten disconnect within 0.2 s", 200, _flood, senders.post_or_leave,
        flags=_UNLIMITED,
    ),
    slots=Attack(
        "answers of 1,990 tokens for 8 clients, one for each slot", 8, _long_answers, post_as_user,
        flags=("--trusted_proxy=127.0.0.1",),
    ),
    more_clients=Attack(
        "the same for 16 clients", 16, _long_answers, post_as_user, flags=("--trusted_proxy=127.0.0.1",)
    ),
    half_letters=Attack("long answers of half characters, and without repeats", 16, _half_letters),
    grammars=Attack("212 hostile grammars × 6", 6, _grammars, growth=400, rotates=True),
    compiles=Attack("schemas that compile without end × 6", 6, _compiles, growth=400),
    compiles_leave=Attack(
        "the same, and the client disconnects", 6, _compiles,
        partial(send_and_disconnect, least=0.1, most=0.5), growth=400,
    ),
    ambiguous=Attack("long answers by an ambiguous grammar × 4", 4, _ambiguous, growth=400),
    compile_clients=Attack(
        "schemas that compile without end, of 6 clients", 6, _compiles, growth=400, clients=6,
        call=_grammar_call,
    ),
    ambiguous_clients=Attack(
        "long answers by an ambiguous grammar, of 4 clients", 4, _ambiguous, growth=400, clients=4,
        call=_grammar_call,
    ),
    breakers=Attack(
        "new sequence breakers in each request, of 8 clients", 8, _breakers, rotates=True, clients=8
    ),
    adapters=Attack(
        "an admin loads hostile adapters × 4", 4, _adapters, post_as_admin, growth=500, rotates=True,
        prepare=hostile_adapters.write,
    ),
    idle=Attack(
        "400 idle connections without a key, 200 files", 400, _same("", b""), hold, files=200, keyed=True
    ),
    trickle=Attack(
        "200 requests sent at one byte per second, with a head alone or with a body", 200,
        _same(COMPLETIONS, b"", _body(prompt="Hello", max_tokens=200, stop=["x" * 200])), senders.drip,
    ),
    tiny_chunks=Attack(
        "bodies without a key in chunks of one byte × 8", 8, _same(COMPLETIONS, b"1\r\na\r\n" * 40_000),
        senders.chunks, keyed=True,
    ),
    chunks=Attack(
        "the same, in chunks of 1 kB, and with headers of 8 kB × 64", 64,
        _same(
            COMPLETIONS, (b"400\r\n" + b"a" * 1024 + b"\r\n") * 250,
            (b"100;" + b"a" * 8000 + b"\r\n" + b"a" * 256 + b"\r\n") * 30,
        ),
        senders.chunks, keyed=True,
    ),
    heads=Attack(
        "8,092 lines in a head or in trailers, or a long path, without a key × 8", 8,
        lambda _: [
            [(COMPLETIONS, senders.LINES)], [(COMPLETIONS, senders.TRAILERS)],
            [(senders.TARGET, b"\r\n")],
        ],
        senders.heads, keyed=True,
    ),
    requests=Attack(
        "small requests without a key, each on a new connection × 64", 64,
        _same(COMPLETIONS, b"content-length: 2\r\n\r\n{}"), senders.heads, keyed=True,
    ),
    tiny_reads=Attack(
        "bodies in segments of one byte × 128", 128, _same(COMPLETIONS, b"a"), senders.tiny_reads
    ),
    pipelined=Attack(
        "1,000 requests at once without a key × 200", 200, _same(COMPLETIONS, b"{}"), senders.pipelined,
        keyed=True,
    ),
    unfinished=Attack(
        "1,060 bodies without their last byte, from 5 addresses", 1060, _same(COMPLETIONS, b"{}"),
        senders.unfinished, clients=5,
    ),
    unfinished_large=Attack(
        "the same × 100 of 4 MiB", 100, _same(COMPLETIONS, b"{" * LARGEST), senders.unfinished, clients=5
    ),
)  # fmt: skip


def main(job: dict[str, Any]) -> None:
    attack = ATTACKS[job["attack"]]
    lock = threading.Lock()
    end = threading.Event()
    chains = attack.chains(job["context"])
    counts = Counter[str]()
    texts = dict[str, str]()

    def work(number: int) -> None:
        chain = chains[number % len(chains)]
        source = HOST if attack.clients == 1 else f"127.0.1.{1 + number % attack.clients}"
        sender = dataclasses.replace(target, source=source)
        at = 0
        while not end.is_set():
            with lock:
                if counts["requests"] == MOST_REQUESTS:
                    return
                counts["requests"] += 1
            try:
                result = attack.send(sender, *chain[at])
            except (OSError, http.client.HTTPException) as error:
                result = f"{type(error).__name__} {error}"
            status, _, text = result.partition(" ")
            with lock:
                counts[status] += 1
                texts.setdefault(status, text[-200:])
            if status not in ("200", "left"):
                time.sleep(PAUSE)
            if attack.rotates or status in ("400", "413"):
                at = (at + 1) % len(chain)

    print("ready", flush=True)
    sys.stdin.readline()
    target = Target(job["port"], job["headers"], time.monotonic() + job["seconds"])
    threading.stack_size(2**18)
    for i in range(attack.workers):
        threading.Thread(target=work, args=(i,), daemon=True).start()
    select.select([sys.stdin], [], [], job["seconds"])
    end.set()
    with lock:
        print(json.dumps(dict(counts=counts, said={k: v for k, v in texts.items() if v})), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
