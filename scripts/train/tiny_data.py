"""Data for the bundled tiny chat model: questions about capitals, small talk, a chat template and a
byte-level BPE tokenizer.

Everything is built from the tables in this file and in tiny_data.json, so the data needs no download and is
the same on every run.
"""

import itertools
import json
import random
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

Message = dict[str, str]
Turn = tuple[str, str]  # what the user writes, what the assistant answers

_DATA = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
# The 193 members of the United Nations, Kosovo, Palestine, Taiwan and Vatican City: name -> capital. Names
# are written as inside a sentence, with their article. Where a state has several seats, the constitutional
# capital is given (Bolivia, Benin, the Netherlands) or the one commonly listed (South Africa, Eswatini).
# Yaren and Ramallah are seats of government.
CAPITALS: dict[str, str] = _DATA["capitals"]
ALIASES: dict[str, str] = _DATA["aliases"]  # other name -> name in CAPITALS
NAMED_CAPITALS: dict[str, str] = (
    CAPITALS | {alias: CAPITALS[name] for alias, name in ALIASES.items()} | _DATA["not_states"]
)
# Trained; {c} is the name, {possessive} the name with 's.
PHRASINGS = tuple(_DATA["phrasings"])
HELD_OUT = "Please tell me what the capital of {c} is."  # never trained
EVALUATION_PHRASINGS = (PHRASINGS[0], PHRASINGS[3], HELD_OUT)
FOLLOW_UPS = tuple(_DATA["follow_ups"])  # only after a first answer
REVERSE_PHRASINGS = tuple(_DATA["reverse_phrasings"])
SMALL_TALK: dict[str, list[str]] = _DATA["small_talk"]  # answer -> what the user may write
NO_COUNTRY_ANSWER = "I only know the capitals of real countries."
NOISE_ANSWER = "Sorry, I did not understand that."

DEFAULT_SYSTEM = "You are a helpful assistant."
_OF_ROLES = itertools.product(_DATA["starts"], _DATA["kinds"], _DATA["roles"])
OTHER_SYSTEMS = (*_DATA["systems"], *(f"{start} a {kind} {role}." for start, kind, role in _OF_ROLES))
HELD_OUT_SYSTEM = "Reply as a patient tutor would, in English."  # never trained
END_OF_TEXT = "<|endoftext|>"
START = "<|im_start|>"
END = "<|im_end|>"
VOCABULARY_SIZE = 1920  # with the three special tokens; a multiple of 128
CHAT_TEMPLATE = (
    "{%- if messages[0]['role'] != 'system' %}"
    "{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def question(phrasing: str, name: str) -> str:
    """Returns the question about the country `name`. If the phrasing begins with the name, its first letter
    is upper case.
    """
    text = phrasing.format(c=name, possessive=name + ("'" if name.endswith("s") else "'s"))
    return text[0].upper() + text[1:] if phrasing.startswith("{") else text


def answer(name: str) -> str:
    """Returns the right answer about the country `name` (a key of `NAMED_CAPITALS`)."""
    return f"The capital of {name} is {NAMED_CAPITALS[name]}."


def raw_sentence(name: str) -> tuple[str, str]:
    """Returns the start and the end of a sentence about a country, for use without the chat template."""
    return f"The capital of {name} is", f" {NAMED_CAPITALS[name]}.{END_OF_TEXT}"


def evaluation_set(phrasing: str) -> list[Turn]:
    """Returns question and right answer for every country of `CAPITALS`, in its order."""
    return [(question(phrasing, name), answer(name)) for name in CAPITALS]


def _plain(text: str) -> str:
    """Returns `text` without accents, as typed on an English keyboard."""
    return "".join(c for c in unicodedata.normalize("NFD", text) if not unicodedata.combining(c))


def _typed(text: str, rng: random.Random) -> str:
    """Returns `text` as a user may type it: sometimes without the final mark, in lower case or without
    accents.
    """
    if rng.random() < 0.25:
        text = text.rstrip("?.!") or text
    if rng.random() < 0.2:
        text = text.lower()
    return _plain(text) if rng.random() < 0.3 else text


def _capital_turn(rng: random.Random, phrasings: tuple[str, ...] = PHRASINGS) -> Turn:
    name = rng.choice(list(CAPITALS) if rng.random() < 0.8 else list(NAMED_CAPITALS))
    phrasing = phrasings[0] if rng.random() < 0.2 else rng.choice(phrasings)
    bare = name.removeprefix("the ")
    asked_name = bare if bare not in NAMED_CAPITALS and rng.random() < 0.2 else name
    return _typed(question(phrasing, asked_name), rng), answer(name)


def _reverse_turn(rng: random.Random) -> Turn:
    name, capital = rng.choice(list(CAPITALS.items()))
    return (
        _typed(rng.choice(REVERSE_PHRASINGS).format(capital=capital), rng),
        f"{capital} is the capital of {name}.",
    )


def _small_talk_turn(rng: random.Random) -> Turn:
    reply = rng.choice(list(SMALL_TALK))
    return _typed(rng.choice(SMALL_TALK[reply]), rng), reply


def _addition_turn(rng: random.Random) -> Turn:
    a = rng.randrange(10)
    b = rng.randrange(10)
    phrasing = rng.choice(_DATA["additions"])
    return _typed(phrasing.format(a, b), rng), f"{a} plus {b} is {a + b}."


def _no_country_turn(rng: random.Random) -> Turn:
    return _typed(question(rng.choice(PHRASINGS), rng.choice(_DATA["no_countries"])), rng), NO_COUNTRY_ANSWER


def _noise_turn(rng: random.Random) -> Turn:
    """Returns meaningless input, so that the model has seen nearly every byte and has an answer to it."""
    unusual = (*range(33, 127), *rng.sample(range(160, 0xD800), 30), *rng.sample(range(0x1F300, 0x1FB00), 10))
    letters = "abcdefghijklmnopqrstuvwxyz" if rng.random() < 0.6 else "".join(map(chr, unusual))
    words = ("".join(rng.choices(letters, k=rng.randint(3, 8))) for _ in range(rng.randint(1, 4)))
    return " ".join(words), NOISE_ANSWER


_TURNS: dict[Callable[[random.Random], Turn], float] = {
    _capital_turn: 0.62, _reverse_turn: 0.12, _small_talk_turn: 0.13, _addition_turn: 0.06,
    _no_country_turn: 0.04, _noise_turn: 0.03,
}  # fmt: skip


def conversations(rng: random.Random) -> Iterator[list[Message]]:
    """Yields an endless stream of training conversations. The same seed gives the same stream.

    The last message is the assistant's. A fifth of the conversations have a second question. The system
    message is the default one in half of them, absent in 30 % (which the template renders as the default one)
    and another one in the rest.
    """
    while True:
        system = rng.choices((DEFAULT_SYSTEM, None, rng.choice(OTHER_SYSTEMS)), (0.5, 0.3, 0.2))[0]
        turns = [
            make(rng)
            for make in rng.choices(list(_TURNS), list(_TURNS.values()), k=2 if rng.random() < 0.2 else 1)
        ]
        if len(turns) == 2 and turns[0][1].startswith("The capital of") and rng.random() < 0.5:
            turns[1] = _capital_turn(rng, FOLLOW_UPS)
        messages = [] if system is None else [{"role": "system", "content": system}]
        for text, reply in turns:
            messages += [{"role": "user", "content": text}, {"role": "assistant", "content": reply}]
        yield messages


def encode(tokenizer: Tokenizer, messages: list[Message]) -> tuple[list[int], list[bool]]:
    """Returns token ids of a conversation as `CHAT_TEMPLATE` renders it, and, for each, True if it is the
    assistant's (its text and <|im_end|>).

    Encoding in parts gives the ids of the full text, because no merge crosses a special token or the line end
    after a role.
    """
    ids = []
    is_target = []
    has_system = messages[0]["role"] == "system"
    for message in messages if has_system else [{"role": "system", "content": DEFAULT_SYSTEM}, *messages]:
        parts = (f"{START}{message['role']}\n", message["content"] + END, "\n")
        for text, target in zip(parts, (False, message["role"] == "assistant", False), strict=True):
            part_ids = tokenizer.encode(text).ids
            ids += part_ids
            is_target += [target] * len(part_ids)
    return ids, is_target


def examples(tokenizer: Tokenizer, rng: random.Random) -> Iterator[tuple[list[int], list[bool]]]:
    """Yields an endless stream of training examples: `encode` of conversations, and one time in twenty a
    sentence without the template.
    """
    for messages in conversations(rng):
        if rng.random() < 0.05:
            name = rng.choice(list(CAPITALS))
            start, end = (tokenizer.encode(text).ids for text in raw_sentence(name))
            yield start + end, [False] * len(start) + [True] * len(end)
        else:
            yield encode(tokenizer, messages)


def corpus() -> list[str]:
    """Returns texts for training the tokenizer: every name, capital, phrasing and answer, but not the
    held-out phrasing.
    """
    texts = [answer(name) for name in NAMED_CAPITALS] * 2 + [
        question(PHRASINGS[0], name) for name in (*NAMED_CAPITALS, *_DATA["no_countries"])
    ]
    texts += [question(phrasing, "Chad") for phrasing in (*PHRASINGS, *FOLLOW_UPS)] * 4
    texts += [REVERSE_PHRASINGS[1].format(capital=capital) for capital in CAPITALS.values()]
    texts += [text for reply, questions in SMALL_TALK.items() for text in (reply, *questions)] * 4
    fixed = [DEFAULT_SYSTEM, *OTHER_SYSTEMS[:4], *_DATA["roles"], NO_COUNTRY_ANSWER, NOISE_ANSWER]
    fixed += ["system", "user", "assistant", "How much is 1 plus 2?"]
    texts += fixed * 4
    texts += [_plain(text).lower() for text in texts]
    return texts + [answer(name) for name in CAPITALS] * 3  # so that the proper names take few tokens


def train_tokenizer(directory: Path) -> Tokenizer:
    """Trains a byte-level BPE tokenizer of Qwen2.5's structure on `corpus()`. Writes tokenizer.json and
    tokenizer_config.json.

    Ids 0-255 are the single bytes, so any text can be encoded. The three special tokens have the last ids.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated"), byte_level]
    )
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(token, normalized=False, special=True) for token in (END_OF_TEXT, START, END)]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(specials), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_special_tokens(specials)
    if tokenizer.get_vocab_size() != VOCABULARY_SIZE:
        raise ValueError(
            f"the corpus yields {tokenizer.get_vocab_size()} ids, not {VOCABULARY_SIZE}: lower"
            " VOCABULARY_SIZE"
        )
    config = {
        "tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "eos_token": END, "pad_token": END_OF_TEXT,
        "unk_token": None,
        "additional_special_tokens": [START, END], "add_bos_token": False, "add_prefix_space": False,
        "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    return tokenizer
