"""Converts text to ids and back: the `tokenizers` library, and the checkpoint's chat template."""

import contextlib
import dataclasses
import functools
import json
import logging
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from ..errors import InputError
from ..formats.files import file_exists, read_json
from ..grammar.vocabulary import BYTES_OF_LETTERS
from ..tool_calls.harmony import CHANNEL, CONTROL_TOKENS, END, MESSAGE, SPELLINGS, START, STOP_TOKENS
from ..tool_calls.tool_call_form import tool_call_forms
from .chat_template import render
from .response_template import ResponseTemplate, parse_response_template
from .template_files import read_chat_templates
from .template_tools import TemplateTools, find_template_tools
from .token_coverage import token_coverage
from .tokenizer_classes import follow_settings
from .tokenizer_limits import (
    check_added_tokens,
    check_text_growth,
    check_token_count,
    check_tokenizer_size,
)

_LOGGER = logging.getLogger(__name__)

# Qwen's chat format, for a checkpoint without a template.
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{%"
    " endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_QWEN_STOPS = ("<|im_end|>", "<|endoftext|>")
_TOKEN_OPTIONS = ("lstrip", "rstrip", "single_word", "normalized", "special")
_LONG = 4096  # ids
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclasses.dataclass(eq=False, repr=False)
class Tokenizer:
    """The tokenizer of a checkpoint, with its chat template and EOS ids.

    `load_model` returns it as `Model.tokenizer`, and `Tokenizer.from_dir` reads it from a directory.

    Attributes:
        backend: the `tokenizers.Tokenizer`.
        chat_template: the Jinja source of the chat template. If the checkpoint has none, it is ChatML if the
            vocabulary has `<|im_start|>`, and None otherwise.
        special_tokens: the texts of the tokens that a template may use: bos_token, eos_token, ….
        eos_token_ids: ids that end an answer.
        response_template: the form in which answers are written, by the checkpoint. None: the checkpoint does
            not say.
        tool_template: the chat template of conversations with tools. None: `chat_template`.
        directory: the directory from which it was read. None: it was not read from a directory.
    """

    backend: tokenizers.Tokenizer
    _: dataclasses.KW_ONLY
    chat_template: str | None
    special_tokens: dict[str, str]
    eos_token_ids: Sequence[int]
    response_template: ResponseTemplate | None = None
    tool_template: str | None = None
    directory: Path | None = None

    def __post_init__(self) -> None:
        chatml = CHATML if self.backend.token_to_id("<|im_start|>") is not None else None
        self.chat_template = self.chat_template or chatml
        self.eos_token_ids = tuple(self.eos_token_ids)

    def __repr__(self) -> str:
        return f"Tokenizer(vocabulary {self.backend.get_vocab_size()}, EOS ids {self.eos_token_ids})"

    @classmethod
    def from_dir(cls, path: str | Path) -> "Tokenizer":
        """Reads the tokenizer of a checkpoint directory.

        It reads tokenizer.json, and if they exist tokenizer_config.json, special_tokens_map.json,
        added_tokens.json, the chat templates, generation_config.json and config.json. Settings of
        tokenizer_config.json change the ids like in transformers. A warning names the settings that are not
        followed.

        Args:
            path: the directory.

        Raises:
            InputError: a file cannot be read.
        """
        path = Path(path)
        backend = _load_backend(path)
        settings = read_json(path / "tokenizer_config.json") or {}
        generation = read_json(path / "generation_config.json") or {}
        config = read_json(path / "config.json") or {}
        with as_input_error(f"{path / 'tokenizer.json'} cannot be used"):
            named = follow_settings(backend, settings, config)
        special = _add_declared_tokens(backend, path, named | settings)
        template, tool_template = read_chat_templates(path, settings)
        ends = eos_ids(generation, config, backend, special.get("eos_token", ""))
        return cls(
            backend, chat_template=template, special_tokens=special, eos_token_ids=ends,
            tool_template=tool_template, response_template=_response_template(settings), directory=path,
        )  # fmt: skip

    def files(self) -> dict[str, str]:
        """Returns the texts of the files that `from_dir` reads, by their names."""
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **self.special_tokens}
        if self.backend.encode_special_tokens:
            settings["split_special_tokens"] = True
        found = {"tokenizer.json": self.backend.to_str(), "tokenizer_config.json": json.dumps(settings)}
        return found | ({"chat_template.jinja": self.chat_template} if self.chat_template else {})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text. It applies no chat template.

        Args:
            text: the text.
            add_special_tokens: True adds the checkpoint's special tokens, for example BOS, around the text.

        Raises:
            InputError: the argument is not a text, the text has half of a surrogate pair, or the tokenizer is
                broken.
        """
        try:
            with as_input_error("this tokenizer cannot encode the text"):
                # A batch of one: `encode` holds the interpreter's lock, and takes twice as long.
                (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
                return encoding.ids
        except TypeError as error:
            raise InputError(f"only valid Unicode text can be encoded, got {text!r}") from error

    def fewest_ids(self, text: str) -> int:
        """Returns a lower bound of a text's number of ids, from its length. 0: no bound is known."""
        if not self._coverage:
            return 0
        in_bytes, normalizer_factor, longest = self._coverage
        length = len(text.encode(errors="replace")) if in_bytes else len(text)
        return -(-length // (longest if text.isascii() else longest * normalizer_factor))

    @functools.cached_property
    def _coverage(self) -> tuple[bool, int, int] | None:
        return token_coverage(self.backend)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids.

        Args:
            ids: the token ids.
            skip_special_tokens: True leaves special tokens out. It keeps control tokens of Harmony and Gemma
                4 that mark the parts of an answer, like `<think>` in answers of other models.

        Raises:
            InputError: values are not ids, or the tokenizer is broken.
        """
        if skip_special_tokens and self._kept_tokens:
            return self.decode_marked(ids).translate(SPELLINGS)
        return self._decode(ids, skip_special_tokens)

    def decode_marked(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of ids, with the characters of `tool_calls/harmony.py` for Harmony's control
        tokens.
        """
        pieces = []
        start = 0
        for at, token in enumerate(ids):
            if token in self._kept_tokens:
                pieces += [self._decode(ids[start:at], skip_special_tokens), self._kept_tokens[token]]
                start = at + 1
        return "".join([*pieces, self._decode(ids[start:], skip_special_tokens)])

    @functools.cached_property
    def _special_ids(self) -> dict[str, int]:
        """The id of each special token."""
        added = self.backend.get_added_tokens_decoder()
        return {token.content: i for i, token in added.items() if token.special}

    @functools.cached_property
    def _kept_tokens(self) -> dict[int, str]:
        """The texts of special tokens that mark the parts of an answer, by their ids."""
        named = self._special_ids
        tokens = [token for form in tool_call_forms() for token in form.tokens]
        return self.harmony_marks or {named[name]: name for name in tokens if name in named}

    @functools.cached_property
    def harmony_marks(self) -> dict[int, str]:
        """The character of each of Harmony's control tokens, by its id. Empty for a
        vocabulary without them.
        """
        named = self._special_ids
        found = {named[name]: mark for name, mark in CONTROL_TOKENS.items() if name in named}
        return found if {START, CHANNEL, MESSAGE, END} <= {*found.values()} else {}

    @property
    def writes_harmony(self) -> bool:
        """True if answers in a chat have Harmony's channels, because the chat template has them."""
        return bool(self.harmony_marks) and "<|channel|>" in (self.chat_template or "")

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        with as_input_error("this tokenizer cannot decode the ids"):
            ids = list(ids)
            if len(ids) < _LONG:
                return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
            # Takes longer, but does not hold the interpreter's lock.
            return self.backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]

    def token_text(self, token: int) -> str:
        """Returns a token's text after other tokens, with its leading space. A part of a
        character is U+FFFD.
        """
        if token not in self._token_texts:
            context, before = self._context
            text = self.decode([*context, token], skip_special_tokens=False)
            own = text[len(before) :] if text.startswith(before) else self.decode([token], False)
            self._token_texts[token] = own
        return self._token_texts[token]

    def token_bytes(self, token: int) -> bytes | None:
        """Returns the bytes of a token of a byte-level vocabulary, or of a byte token <0x00>. None: another
        token.
        """
        name = self.backend.id_to_token(token) or ""
        if found := re.fullmatch(r"<0x([0-9A-F]{2})>", name):
            return bytes.fromhex(found[1])
        known = BYTES_OF_LETTERS
        return bytes(known[letter] for letter in name) if known.keys() >= set(name) else None

    @functools.cached_property
    def _token_texts(self) -> dict[int, str]:
        return {}

    @functools.cached_property
    def _context(self) -> tuple[list[int], str]:
        """A token after which other tokens are decoded, and its text."""
        ids = self.encode("a", add_special_tokens=False)[-1:]
        return ids, self.decode(ids, skip_special_tokens=False)

    @property
    def answer_template(self) -> ResponseTemplate | None:
        """The response template, if the chat template writes calls in no known form. Otherwise None."""
        return None if self.template_tools.format or self.writes_harmony else self.response_template

    @property
    def template_tools(self) -> TemplateTools:
        """The way in which the chat template handles tools."""
        template = self.get_chat_template(with_tools=True)
        if template is None:
            return TemplateTools(False, None)
        return find_template_tools(template, tuple(self.special_tokens.items()))

    def get_chat_template(self, with_tools: bool) -> str | None:
        """Returns the chat template of conversations with tools, or without tools."""
        return self.tool_template if with_tools and self.tool_template is not None else self.chat_template

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        /,
        add_generation_prompt: bool = True,
        **template_kwargs: object,
    ) -> str:
        """Renders a conversation as one text, in the checkpoint's format.

        To get token ids, use `encode_prompt`.

        Args:
            messages: the conversation: [{"role": "user", "content": "…"}, …].
            add_generation_prompt: True ends the text with the start of the assistant's message.
            template_kwargs: additional variables of the template, for example `tools` or `enable_thinking`.

        Raises:
            InputError: there is no template, it is broken, it exceeds its budget, or it rejects the
                conversation.
        """
        template = self.get_chat_template(template_kwargs.get("tools") is not None)
        if template is None:
            raise InputError(
                "this checkpoint has no chat template: it takes neither a conversation nor a system message,"
                " only a text to be continued"
            )
        variables = {"tools": None, "documents": None, **self.special_tokens, **template_kwargs}
        variables |= dict(messages=messages, add_generation_prompt=add_generation_prompt)
        return render(template, variables)


@contextlib.contextmanager
def as_input_error(what: str) -> Iterator[None]:
    """Turns errors of the tokenizers library into InputError. A panic of the library is not even an
    Exception.
    """
    try:
        yield
    except (TypeError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise InputError(f"{what}: {error}") from error


def _load_backend(path: Path) -> tokenizers.Tokenizer:
    file = path / "tokenizer.json"
    if not file_exists(file):
        raise InputError(
            f"{path} holds no tokenizer.json: text needs a tokenizer (from Python, token ids work without"
            " one)"
        )
    check_tokenizer_size(file)
    with as_input_error(f"{file} is not a readable tokenizer"):
        backend = tokenizers.Tokenizer.from_file(str(file))
        check_added_tokens([token.content for token in backend.get_added_tokens_decoder().values()])
    check_text_growth(file, backend)
    if not backend.get_vocab_size(with_added_tokens=False):
        raise InputError(f"{file} has an empty vocabulary: fetch the checkpoint again")
    backend.no_truncation()  # the file may still ask for both from its last use
    backend.no_padding()
    return backend


def _add_declared_tokens(
    backend: tokenizers.Tokenizer, path: Path, settings: dict[str, Any]
) -> dict[str, str]:
    """Adds the tokens that the checkpoint declares, as transformers does. Returns the texts of the named
    ones.
    """
    declared = settings.get("added_tokens_decoder")
    if declared is None:
        settings = settings | (read_json(path / "special_tokens_map.json") or {})
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    present = backend.get_added_tokens_decoder()
    try:
        check_token_count(len(extra) + len(declared or {}))
        order = dict.fromkeys((*_NAMED_TOKENS, *settings))  # the order in which new tokens get ids
        values = {name: settings.get(name) for name in order if name.endswith("_token")}
        values |= extra if isinstance(extra, dict) else {}
        tokens_by_name = {
            name: _added_token(value, special=True)
            for name, value in values.items()
            if isinstance(value, str | dict)  # not a bool, such as add_bos_token
        }
        named = {name: token.content for name, token in tokens_by_name.items()}
        unnamed = [] if isinstance(extra, dict) else [_added_token(value, special=True) for value in extra]
        if declared is None:
            special = {*named.values(), *(token.content for token in unnamed)}
            by_id = _tokens_of_file(path, special) | present
        else:
            by_id = {int(i): _added_token(declared[i]) for i in declared}
        tokens = {by_id[i].content: by_id[i] for i in sorted(by_id)}
        in_file = {token.content for token in present.values()}
        for token in (*tokens_by_name.values(), *unnamed):
            if token.content not in in_file:
                tokens.setdefault(token.content, token)
        for token in tokens.values():
            token.special = token.special or token.content in named.values()
        check_added_tokens(tokens)
        backend.add_tokens([*tokens.values()])
    except Exception as error:  # of another type, or not Unicode
        raise InputError(
            f"{path / 'tokenizer_config.json'}: its special tokens cannot be read: {error}"
        ) from error
    return named


def _tokens_of_file(path: Path, special: Collection[str]) -> dict[int, tokenizers.AddedToken]:
    """Returns the tokens of added_tokens.json, which earlier versions of transformers wrote, by id."""
    found = read_json(path / "added_tokens.json") or {}
    return {
        i: tokenizers.AddedToken(text, special=text in special, normalized=text not in special)
        for text, i in found.items()
    }


def _added_token(value: Any, **options: bool) -> tokenizers.AddedToken:
    token = value if isinstance(value, dict) else {"content": value}
    if not isinstance(token.get("content"), str):
        raise TypeError(f"{value!r} is neither a text nor an object with a text as its content")
    options |= {name: token[name] for name in _TOKEN_OPTIONS if name in token}
    return tokenizers.AddedToken(token["content"], **options)


def _response_template(settings: dict[str, Any]) -> ResponseTemplate | None:
    spec = settings.get("response_template")
    try:
        return None if spec is None else parse_response_template(spec)
    except InputError as error:
        _LOGGER.warning("answers are not taken apart as the checkpoint says: %s", error)
        return None


def eos_ids(
    generation: dict, config: dict, backend: tokenizers.Tokenizer | None = None, eos_token: str = ""
) -> list[int]:
    """Returns the ids that end an answer: from generation_config.json, else config.json, else the tokenizer's
    eos_token, and Qwen's and Harmony's two stop tokens wherever the vocabulary has them. Without a tokenizer,
    only from the two files.
    """
    found = next((s["eos_token_id"] for s in (generation, config) if s.get("eos_token_id") is not None), None)
    ids = found if isinstance(found, list) else [found]
    if bad := [i for i in ids if i is not None and type(i) is not int]:
        raise InputError(f"eos_token_id must be a token id or a list of them, got {bad[0]!r}")
    if backend is not None:
        added = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        named = [eos_token] if found is None else []
        stops = (*_QWEN_STOPS, *STOP_TOKENS) if "<|channel|>" in added else _QWEN_STOPS
        named += [stop for stop in stops if stop in added]
        ids = [*ids, *map(backend.token_to_id, named)]
    return list(dict.fromkeys(i for i in ids if i is not None))
