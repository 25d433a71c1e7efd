"""Text to ids and back: the `tokenizers` library, and the checkpoint's own chat template."""

import contextlib
import functools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

from ..errors import InputError
from .chat_template import render
from .files import is_there, read_json, read_text

# Qwen's chat format, for a checkpoint that brings no template of its own.
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{%"
    " endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_QWEN_STOPS = ("<|im_end|>", "<|endoftext|>")
_TOKEN_OPTIONS = ("lstrip", "rstrip", "single_word", "normalized", "special")
_LONG = 4096  # ids
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A checkpoint's tokenizer, chat template and EOS ids.

    Attributes:
        backend: the `tokenizers.Tokenizer` proper.
        chat_template: Jinja source; where none is given ChatML if the vocabulary has <|im_start|>, else None.
        special_tokens: names that a template may use (bos_token, eos_token, …) and their texts.
        eos_token_ids: ids that end an answer.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: str | None,
        special_tokens: dict[str, str],
        eos_token_ids: Sequence[int],
    ):
        self.backend = backend
        chatml = CHATML if backend.token_to_id("<|im_start|>") is not None else None
        self.chat_template = chat_template or chatml
        self.special_tokens = special_tokens
        self.eos_token_ids = tuple(eos_token_ids)

    def __repr__(self) -> str:
        return f"Tokenizer(vocabulary {self.backend.get_vocab_size()}, EOS ids {self.eos_token_ids})"

    @classmethod
    def from_dir(cls, path: str | Path) -> "Tokenizer":
        """Reads tokenizer.json, and tokenizer_config.json, special_tokens_map.json, chat_template.jinja,
        generation_config.json and config.json where they exist.

        Raises:
            InputError: no tokenizer.json, or a file that cannot be read.
        """
        path = Path(path)
        backend = _backend(path)
        names = "tokenizer_config", "generation_config", "config"
        settings, generation, config = (read_json(path / f"{name}.json") or {} for name in names)
        special = _declare(backend, path, settings)
        template = _chat_template(path, settings)
        ends = eos_ids(generation, config, backend, special.get("eos_token", ""))
        return cls(backend, chat_template=template, special_tokens=special, eos_token_ids=ends)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; with add_special_tokens what the checkpoint puts around each text (BOS, say).

        Raises:
            InputError: not a text, half a surrogate pair in it, or a broken tokenizer.
        """
        try:
            with _named("this tokenizer cannot encode the text"):
                # Of one text: `encode` holds the interpreter's lock, and this takes half the time.
                (found,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
                return found.ids
        except TypeError as error:
            raise InputError(f"only valid Unicode text can be encoded, got {text!r}") from error

    def fewest_ids(self, text: str) -> int:
        """Least number of ids that the text has for certain, told from its length: 0 where nothing can be."""
        if not self._longest:
            return 0
        by_bytes, shrinks, longest = self._longest
        length = len(text.encode(errors="replace")) if by_bytes else len(text)
        return -(-length // (longest if text.isascii() else longest * shrinks))

    @functools.cached_property
    def _longest(self) -> tuple[bool, int, int] | None:
        return _longest_token(self.backend)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids.

        Raises:
            InputError: ids that are none, or a broken tokenizer.
        """
        with _named("this tokenizer cannot decode the ids"):
            ids = list(ids)
            if len(ids) < _LONG:
                return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
            # It takes longer, but does not hold the interpreter's lock.
            return self.backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]

    def token_text(self, token: int) -> str:
        """A token's text as it stands behind others, with the blank that it may begin with; a part of a
        character is U+FFFD.
        """
        if token not in self._token_texts:
            ids, before = self._anchor
            text = self.decode([*ids, token], skip_special_tokens=False)
            own = text[len(before) :] if text.startswith(before) else self.decode([token], False)
            self._token_texts[token] = own
        return self._token_texts[token]

    def token_bytes(self, token: int) -> bytes | None:
        """The bytes of a token of which some are a part of a character; None: it is another one."""
        piece = self.backend.id_to_token(token) or ""
        if found := re.fullmatch(r"<0x([0-9A-F]{2})>", piece):
            return bytes.fromhex(found[1])
        known = _letters_of_bytes()
        return bytes(known[letter] for letter in piece) if known.keys() >= set(piece) else None

    @functools.cached_property
    def _token_texts(self) -> dict[int, str]:
        return {}

    @functools.cached_property
    def _anchor(self) -> tuple[list[int], str]:
        """A token that others may stand behind, and its text."""
        ids = self.encode("a", add_special_tokens=False)[-1:]
        return ids, self.decode(ids, skip_special_tokens=False)

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        /,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """The conversation as one text, in the checkpoint's format.

        Args:
            messages: [{"role": "user", "content": "…"}, …].
            add_generation_prompt: whether to open the assistant's turn.
            template_kwargs: further variables of the template (tools, enable_thinking, …).

        Raises:
            InputError: no template, or it is broken, asks for too much, or refuses the conversation.
        """
        if self.chat_template is None:
            raise InputError(
                "this checkpoint has no chat template: it takes neither a conversation nor a system message,"
                " only a text to be continued"
            )
        variables = {"tools": None, "documents": None, **self.special_tokens, **template_kwargs}
        variables |= dict(messages=messages, add_generation_prompt=add_generation_prompt)
        return render(self.chat_template, variables)


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    """Whatever the tokenizers library raises, as one error: a bare Exception, or a panic, which is none."""
    try:
        yield
    except (TypeError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise InputError(f"{what}: {error}") from error


def _backend(path: Path) -> tokenizers.Tokenizer:
    file = path / "tokenizer.json"
    if not is_there(file):
        raise InputError(
            f"{path} holds no tokenizer.json: text needs a tokenizer (from Python, token ids work without"
            " one)"
        )
    with _named(f"{file} is no readable tokenizer"):
        backend = tokenizers.Tokenizer.from_file(str(file))
    if not backend.get_vocab_size(with_added_tokens=False):
        raise InputError(f"{file} has an empty vocabulary: fetch the checkpoint again")
    # Prompts are neither cut nor filled up, whatever the file was last used for.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _declare(backend: tokenizers.Tokenizer, path: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Adds the tokens that the checkpoint declares, as transformers does; gives those with a name."""
    declared = settings.get("added_tokens_decoder")
    if declared is None:
        settings = settings | (read_json(path / "special_tokens_map.json") or {})
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    present = backend.get_added_tokens_decoder()
    try:
        order = dict.fromkeys((*_NAMES, *settings))  # in which new ones get ids
        given = {name: settings.get(name) for name in order if name.endswith("_token")}
        if isinstance(extra, dict):
            given = given | extra
            extra = []
        named = {name: _token(value, special=True) for name, value in given.items() if _is_token(value)}
        declared = present if declared is None else {int(i): _token(declared[i]) for i in declared}
        tokens = [declared[i] for i in sorted(declared)]
        known = {token.content for token in (*present.values(), *tokens)}
        for token in (*named.values(), *(_token(value, special=True) for value in extra)):
            if token.content not in known:
                known.add(token.content)
                tokens.append(token)
        names = {token.content for token in named.values()}
        for token in tokens:
            token.special = token.special or token.content in names
        backend.add_tokens(tokens)
    except Exception as error:  # of another type, or not Unicode
        raise InputError(
            f"{path / 'tokenizer_config.json'}: its special tokens cannot be read: {error}"
        ) from error
    return {name: token.content for name, token in named.items()}


def _is_token(value: Any) -> bool:
    return isinstance(value, str | dict)  # and not add_bos_token, say, which is a bool


def _token(value: Any, **options: bool) -> tokenizers.AddedToken:
    given = value if isinstance(value, dict) else {"content": value}
    if not isinstance(given.get("content"), str):
        raise TypeError(f"{value!r} is neither a text nor has it a content that is one")
    options |= {name: given[name] for name in _TOKEN_OPTIONS if name in given}
    return tokenizers.AddedToken(given["content"], **options)


def _longest_token(backend: tokenizers.Tokenizer) -> tuple[bool, int, int] | None:
    """For a tokenizer that loses nothing of a text: whether tokens cover bytes or characters, how many times
    fewer its normalizer can make of them, and the most that a token covers; None: not known to be one.
    """
    added = backend.get_added_tokens_decoder().values()
    normalizers = _parts(backend.normalizer)
    splitters = _parts(backend.pre_tokenizer)
    by_bytes = any(part["type"] == "ByteLevel" for part in splitters)
    vocabulary = backend.get_vocab(with_added_tokens=False)
    pieces = pre_tokenizers.ByteLevel.alphabet() if by_bytes else (f"<0x{byte:02X}>" for byte in range(256))
    if (
        not all(map(_keeps, normalizers + splitters))
        or not isinstance(backend.model, models.BPE)
        or not (by_bytes or backend.model.byte_fallback)
        or not vocabulary.keys() >= set(pieces)  # nothing is unknown
        # These swallow the spaces beside them.
        or any(token.lstrip or token.rstrip for token in added)
    ):
        return None
    # A composed character stands for four at most, and for three times its bytes.
    shrinks = (3 if by_bytes else 4) if {"type": "NFC"} in normalizers else 1
    covered = max(map(len, vocabulary))  # a character of a byte-level vocabulary is a byte
    texts = (token.content.encode() if by_bytes else token.content for token in added)
    return by_bytes, shrinks, max(covered, *map(len, texts), 1)


@functools.cache
def _letters_of_bytes() -> dict[str, int]:
    """The bytes that the letters of byte-level vocabularies stand for (GPT-2)."""
    own = {byte for byte in range(256) if chr(byte).isprintable() and byte not in (0x20, 0xA0, 0xAD)}
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _keeps(part: dict[str, Any]) -> bool:
    """Whether a normalizer or a pre-tokenizer is known to leave out nothing of a text."""
    kept = ("NFC", "Prepend", "ByteLevel", "Digits", "Metaspace")
    return (
        part["type"] in kept
        or (part["type"] == "Split" and part["behavior"] != "Removed")
        or (part["type"] == "Replace" and len(part["pattern"].get("String", "")) == len(part["content"]) == 1)
    )


def _parts(component: Any) -> list[dict[str, Any]]:
    """The settings of a normalizer or a pre-tokenizer, one after the other."""
    if component is None:
        return []
    settings = json.loads(component.__getstate__())
    return settings.get("normalizers") or settings.get("pretokenizers") or [settings]


def _chat_template(path: Path, settings: dict) -> str | None:
    if (template := read_text(path / "chat_template.jinja")) is not None:
        return template
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default", template)
    if template is not None and not isinstance(template, str):
        raise InputError(
            f"{path / 'tokenizer_config.json'}: chat_template must be a text, or a list of which one is named"
            " 'default'"
        )
    return template


def eos_ids(
    generation: dict, config: dict, backend: tokenizers.Tokenizer | None = None, eos_token: str = ""
) -> list[int]:
    """Ids that end an answer: from generation_config.json, else config.json, else the tokenizer's eos_token;
    Qwen's two stops wherever the vocabulary has them. Without a tokenizer, what the two files say.
    """
    found = next((s["eos_token_id"] for s in (generation, config) if s.get("eos_token_id") is not None), None)
    ids = found if isinstance(found, list) else [found]
    if bad := [i for i in ids if i is not None and type(i) is not int]:
        raise InputError(f"eos_token_id must be a token id or a list of them, got {bad[0]!r}")
    if backend is not None:
        added = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        named = [eos_token] if found is None else []
        named += [stop for stop in _QWEN_STOPS if stop in added]
        ids = [*ids, *map(backend.token_to_id, named)]
    return list(dict.fromkeys(i for i in ids if i is not None))
