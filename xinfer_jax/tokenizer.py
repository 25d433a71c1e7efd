"""Text to ids and back: the `tokenizers` library, the checkpoint's own chat template, and detokenizing as ids
come.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from .chat_template import render
from .errors import InputError
from .files import read_json

# Qwen's chat format, for a checkpoint that brings no template of its own.
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{%"
    " endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_QWEN_STOPS = ("<|im_end|>", "<|endoftext|>")


class Tokenizer:
    """A checkpoint's tokenizer, chat template and EOS ids.

    Attributes:
        backend: the `tokenizers.Tokenizer` proper.
        chat_template: Jinja source.
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
        """
        Args:
            backend: the tokenizer proper.
            chat_template: Jinja source; None: ChatML.
            special_tokens: names that a template may use (bos_token, eos_token, …) and their texts.
            eos_token_ids: ids that end an answer.
        """
        self.backend = backend
        self.chat_template = chat_template or CHATML
        self.special_tokens = special_tokens
        self.eos_token_ids = tuple(eos_token_ids)

    def __repr__(self) -> str:
        return f"Tokenizer(vocabulary {self.backend.get_vocab_size()}, EOS ids {self.eos_token_ids})"

    @classmethod
    def from_dir(cls, path: str | Path) -> "Tokenizer":
        """Reads tokenizer.json, and tokenizer_config.json, chat_template.jinja, generation_config.json and
        config.json where they exist.

        Raises:
            InputError: no tokenizer.json, or a file that cannot be read.
        """
        path = Path(path)
        file = path / "tokenizer.json"
        if not file.is_file():
            raise InputError(
                f"{path} holds no tokenizer.json: text needs a tokenizer (from Python, token ids work without"
                " one)"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise InputError(f"{file} is no readable tokenizer: {error}") from error
        settings, generation, config = (
            read_json(path / f"{name}.json") or {}
            for name in ("tokenizer_config", "generation_config", "config")
        )
        special = {
            name: _text(value)
            for name, value in settings.items()
            if name.endswith("_token") and value is not None
        }
        return cls(
            backend,
            chat_template=_chat_template(path, settings),
            special_tokens=special,
            eos_token_ids=eos_ids(generation, config, backend, special.get("eos_token", "")),
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; with add_special_tokens, what the checkpoint puts around every text (BOS, for
        instance).

        Raises:
            InputError: not a text, or half a surrogate pair in it.
        """
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            raise InputError(f"only valid Unicode text can be encoded, got {text!r}") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True, **template_kwargs: Any
    ) -> str:
        """The conversation as one text, in the checkpoint's format.

        Args:
            messages: [{"role": "user", "content": "…"}, …].
            add_generation_prompt: whether to open the assistant's turn.
            template_kwargs: further variables of the template (tools, enable_thinking, …).

        Raises:
            InputError: the template is broken, or refuses the conversation.
        """
        variables = {"tools": None, "documents": None, **self.special_tokens, **template_kwargs}
        return render(
            self.chat_template,
            variables | dict(messages=messages, add_generation_prompt=add_generation_prompt),
        )


class IncrementalDecoder:
    """Ids in, pieces of text out, never half a UTF-8 character; joined, the pieces are `decode` of all ids.

    Only a few ids are decoded again at each step: those since the text was last whole, and the ones before
    for context.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._decode = tokenizer.decode
        self._before: list[int] = []  # the last ids whose text is out
        self._pending: list[int] = []  # ids whose text is not

    def push(self, token: int) -> str:
        """The text that this id completes, empty while a character is only half there."""
        self._pending.append(token)
        piece = self.finish()
        if not piece or piece.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._before, self._pending = self._pending, []
        return piece

    def finish(self) -> str:
        """What is left when no more ids come."""
        # Decoded behind what comes before, since decoders treat the start of a text apart (a leading space,
        # for instance).
        return self._decode(self._before + self._pending)[len(self._decode(self._before)) :]


def _chat_template(path: Path, settings: dict) -> str | None:
    if (path / "chat_template.jinja").is_file():
        try:
            return (path / "chat_template.jinja").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path / 'chat_template.jinja'} is not readable text: {error}") from error
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {
            entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)
        }.get("default", template)
    if template is not None and not isinstance(template, str):
        raise InputError(
            f"{path / 'tokenizer_config.json'}: chat_template must be a text, or a list of which one is named"
            " 'default'"
        )
    return template


def _text(token: Any) -> str:
    return token.get("content", "") if isinstance(token, dict) else str(token)


def eos_ids(
    generation: dict,
    config: dict,
    backend: tokenizers.Tokenizer | None = None,
    eos_token: str = "",
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
