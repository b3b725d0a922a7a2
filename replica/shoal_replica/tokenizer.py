"""Text to token ids and back, with a Hugging Face ``tokenizer.json``; needs neither transformers nor torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.decoders import ByteLevel

from shoal_replica.chat_template import ChatTemplate, PromptEnd, Turn
from shoal_replica.errors import ConfigError, InvalidArgument, NotFound
from shoal_replica.model_config import read_json


class Tokenizer:
    """A model's tokenizer and its chat template."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, chat_template: ChatTemplate | None = None) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._is_byte_level = isinstance(tokenizer.decoder, ByteLevel)
        self._fallback_ids = _fallback_ids(tokenizer)

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Read ``tokenizer.json`` and, where there is one, the chat template.

        Raises:
            NotFound: the folder holds no tokenizer.json.
            ConfigError: a file in it is malformed.
        """
        path = Path(folder)
        file = path / "tokenizer.json"
        if not file.is_file():
            raise NotFound(f"model: {str(folder)!r} holds no tokenizer.json")
        try:
            tokenizer = tokenizers.Tokenizer.from_buffer(file.read_bytes())
        except ValueError as error:
            raise ConfigError(f"model: {file} is not a tokenizer ({error})") from None
        config = read_json(path / "tokenizer_config.json") or {}
        source, for_tools = _template_sources(path / "chat_template.jinja", config)
        return cls(tokenizer, None if source is None else ChatTemplate(source, _special_tokens(config), for_tools))

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included. The model's own vocabulary may be padded beyond it."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def chat_template(self) -> ChatTemplate | None:
        return self._chat_template

    def token_id(self, text: str) -> int | None:
        """The id of the token that is spelled so, if there is one."""
        token_id: int | None = self._tokenizer.token_to_id(text)
        return token_id

    def special_ids(self, texts: Iterable[str]) -> frozenset[int]:
        """Those of ``texts`` that are special tokens, which ``decode`` skips."""
        return self._special_ids.intersection(map(self._tokenizer.token_to_id, texts))

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of ``text``. A rendered chat needs ``add_special_tokens=False``: its template has them already.

        Other threads can run meanwhile: the library's batch call, unlike the one for a single text, releases the GIL.

        Raises:
            InvalidArgument: ``text`` holds a lone surrogate, which UTF-8 cannot encode.
        """
        try:
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError):  # what the library raises for a str that UTF-8 cannot encode
            raise InvalidArgument("text", text, "must be valid Unicode, without lone surrogates") from None
        return tuple(encoding.ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``token_ids``. Ids beyond the vocabulary have no text."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def has_text(self, token_id: int, skip_special_tokens: bool = True) -> bool:
        """Whether ``decode`` uses ``token_id`` rather than skipping it."""
        if skip_special_tokens and token_id in self._special_ids:
            return False
        return self._tokenizer.id_to_token(token_id) is not None

    @property
    def has_byte_fallback(self) -> bool:
        """Whether text that no other token covers is encoded as one token per byte, as SentencePiece does."""
        return bool(self._fallback_ids)

    def is_fallback_byte(self, token_id: int) -> bool:
        return token_id in self._fallback_ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for, special or not; part of a character may be invalid UTF-8."""
        if token_id in self._added:
            return self._added[token_id].encode()
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if self._is_byte_level:
            return bytes(_BYTE_OF[character] for character in piece)
        if (byte := _spelled_byte(piece)) is not None:
            return byte
        return str(piece).replace("\u2581", " ").encode()

    def apply_chat_template(
        self,
        messages: Sequence[Turn],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
        end: PromptEnd = PromptEnd.ANSWER,
    ) -> str:
        """The prompt text for the assistant's next turn after ``messages``; see ``ChatTemplate.render``.

        Raises:
            InvalidArgument: the model has no chat template, or the template refuses the messages.
        """
        if self._chat_template is None:
            roles = [turn.get("role") for turn in messages]
            raise InvalidArgument("messages", roles, "the model has no chat template")
        return self._chat_template.render(messages, tools, options, end)


def _template_sources(path: Path, config: dict[str, Any]) -> tuple[str | None, str | None]:
    """The template, and the one for tools where that is another. ``chat_template.jinja`` takes precedence; else the
    config has one, or several with names.
    """
    if path.is_file():
        return path.read_text(encoding="utf-8"), None
    template = config.get("chat_template")
    if isinstance(template, list):
        by_name = {named.get("name"): str(named["template"]) for named in template}
        return by_name.get("default"), by_name.get("tool_use")
    return None if template is None else str(template), None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """``bos_token``, ``eos_token`` and the like, stored as text or as ``{"content": text}``."""
    tokens = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(name)
        if value is not None:
            tokens[name] = str(value["content"] if isinstance(value, dict) else value)
    return tokens


def _spelled_byte(piece: str) -> bytes | None:
    """The byte of SentencePiece's byte fallback, if ``piece`` is one."""
    is_byte = len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")
    return bytes.fromhex(piece[3:5]) if is_byte else None


def _fallback_ids(tokenizer: tokenizers.Tokenizer) -> frozenset[int]:
    """The tokens that the tokenizer's decoder treats as one byte each."""
    if tokenizer.decoder is None or b'"ByteFallback"' not in tokenizer.decoder.__getstate__():
        return frozenset()
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(0x100)]
    return frozenset([token_id for token_id in ids if token_id is not None])


def _byte_of() -> dict[str, int]:
    """Byte-level BPE writes printable Latin-1 bytes as themselves and the others as U+0100 onwards (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_of()
