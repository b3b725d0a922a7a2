"""How OpenAI's API encodes choices: of chats and of completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shoal_cluster.chat.answer_pieces import CallPiece
from shoal_cluster.serve.call import CHAT_ID, COMPLETION_ID, Chunk
from shoal_cluster.serve.http.encoding import Json
from shoal_cluster.serve.http.openai_echo import Echo
from shoal_replica.executor import TokenLogprobs
from shoal_replica.request import FinishReason

TokenBytes = Callable[[int], bytes]

TOOL_CALLS = "tool_calls"  # OpenAI's finish reason
LEAST_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON lacks


@dataclass(slots=True)
class Choice:
    """One sequence, accumulated. Of each of its calls: the id, the name, and the parts of its arguments."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[tuple[str, str, list[str]]] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def add(self, chunk: Chunk) -> None:
        self.text.append(chunk.text)
        self.reasoning.append(chunk.reasoning)
        for piece in chunk.tool_calls:
            if piece.name:
                self.calls.append((piece.call_id, piece.name, []))
            self.calls[piece.index][2].append(piece.arguments)
        self.logprobs += chunk.logprobs
        self.prompt_logprobs += chunk.prompt_logprobs
        self.token_ids += chunk.token_ids
        self.finish_reason = chunk.finish_reason or self.finish_reason
        self.stop_reason = self.stop_reason if chunk.stop_reason is None else chunk.stop_reason


@dataclass(frozen=True, slots=True)
class ChatShape:
    """How `/v1/chat/completions` encodes a choice. ``opening`` is its first event, before any text.

    ``logprobs`` encodes the log-probabilities of tokens, the first of which begins at ``offset`` in the choice's text,
    and returns them with the offset after the last.
    """

    token_bytes: TokenBytes
    id_prefix: str = CHAT_ID
    whole_object: str = "chat.completion"
    event_object: str = "chat.completion.chunk"
    tells_prompt_by_choice: bool = False  # what vLLM tells of prompts is in each choice, not beside the choices

    def opening(self, index: int) -> Json:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, index: int, chunk: Chunk, logprobs: Json | None, has_called: bool) -> Json:
        delta: Json = {"content": chunk.text} if chunk.text or logprobs else {}
        if chunk.reasoning:
            delta |= _reasoning(chunk.reasoning)
        if chunk.tool_calls:
            delta["tool_calls"] = [_call_delta(piece) for piece in chunk.tool_calls]
        reason = _finish_reason(chunk.finish_reason, has_called)
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason} | _stop_reason(chunk)

    def whole(self, index: int, choice: Choice, logprobs: Json | None) -> Json:
        text, reasoning = "".join(choice.text), "".join(choice.reasoning)
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if reasoning:
            message |= _reasoning(reasoning)
        if choice.calls:
            message["content"] = text or None
            message["tool_calls"] = [_call_body(call_id, name, parts) for call_id, name, parts in choice.calls]
        reason = _finish_reason(choice.finish_reason, bool(choice.calls))
        told = {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}
        return told | _stop_reason(choice)

    def logprobs(self, tokens: Sequence[TokenLogprobs], offset: int) -> tuple[Json, int]:
        content = []
        for token in tokens:
            entry = self._entry(token.token_id, token.logprob)
            content.append(entry | {"top_logprobs": [self._entry(*top) for top in token.top]})
        return {"content": content, "refusal": None}, offset

    def _entry(self, token_id: int, logprob: float) -> Json:
        spelled = self.token_bytes(token_id)
        return {"token": token_text(spelled), "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(spelled)}


@dataclass(frozen=True, slots=True)
class CompletionShape:
    """How `/v1/completions` encodes a choice; see ChatShape."""

    token_bytes: TokenBytes
    id_prefix: str = COMPLETION_ID
    whole_object: str = "text_completion"
    event_object: str = "text_completion"
    tells_prompt_by_choice: bool = True

    def opening(self, index: int) -> None:
        return None

    def delta(self, index: int, chunk: Chunk, logprobs: Json | None, has_called: bool) -> Json:
        told = {"index": index, "text": chunk.text, "logprobs": logprobs, "finish_reason": chunk.finish_reason}
        return told | _stop_reason(chunk)

    def whole(self, index: int, choice: Choice, logprobs: Json | None) -> Json:
        text = "".join(choice.text)
        told = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish_reason}
        return told | _stop_reason(choice)

    def logprobs(self, tokens: Sequence[TokenLogprobs], offset: int) -> tuple[Json, int]:
        texts, offsets, tops = [], [], []
        for token in tokens:
            spelled = self.token_bytes(token.token_id)
            texts.append(token_text(spelled))
            offsets.append(max(0, offset - bool(_inside_characters(spelled[:1]))))
            offset += len(spelled) - _inside_characters(spelled)
            known = (*token.top, (token.token_id, token.logprob))  # the sampled token is always among them
            tops.append({token_text(self.token_bytes(top)): max(logprob, LEAST_LOGPROB) for top, logprob in known})
        body = {
            "tokens": texts,
            "token_logprobs": [max(token.logprob, LEAST_LOGPROB) for token in tokens],
            "top_logprobs": tops,
            "text_offset": offsets,
        }
        return body, offset

    def prompt_logprobs(self, echo: Echo, tokens: Sequence[TokenLogprobs]) -> tuple[Json, int]:
        """``logprobs`` of an echoed prompt, whose first token has none. Special tokens that the tokenizer has put
        before the text begin where it begins.
        """
        known = [TokenLogprobs(echo.token_ids[0], 0.0), *tokens]
        _, width = self.logprobs(known, 0)
        body, offset = self.logprobs(known, len(echo.text) - width)
        body["token_logprobs"][0] = body["top_logprobs"][0] = None
        return body, offset


AnswerShape = ChatShape | CompletionShape


def _inside_characters(spelled: bytes) -> int:
    """Number of UTF-8 continuation bytes."""
    return sum(byte & 0xC0 == 0x80 for byte in spelled)


def token_text(spelled: bytes) -> str:
    """A token as text. One that is only part of a character is shown as its bytes, as OpenAI does."""
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def prompt_logprobs_body(shape: AnswerShape, tokens: Sequence[TokenLogprobs], num_top: int) -> list[Json | None]:
    """In vLLM's form: by token id; nothing for the prompt's first token. Ranks are known of the likeliest tokens."""
    told: list[Json | None] = [None]
    for token in tokens:
        ranks: dict[int, tuple[float, int | None]] = {token.token_id: (token.logprob, None)}
        ranks |= {token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(token.top[:num_top], start=1)}
        told.append(
            {
                str(token_id): {
                    "logprob": max(logprob, LEAST_LOGPROB),
                    "rank": rank,
                    "decoded_token": token_text(shape.token_bytes(token_id)),
                }
                for token_id, (logprob, rank) in ranks.items()
            }
        )
    return told


def _reasoning(text: str) -> Json:
    """Under both names that clients look for: DeepSeek's, and vLLM's."""
    return {"reasoning_content": text, "reasoning": text}


def _call_delta(piece: CallPiece) -> Json:
    function = {"name": piece.name, "arguments": piece.arguments} if piece.name else {"arguments": piece.arguments}
    first = {"id": piece.call_id, "type": "function"} if piece.name else {}
    return {"index": piece.index, **first, "function": function}


def _call_body(call_id: str, name: str, arguments: Sequence[str]) -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": "".join(arguments)}}


def _finish_reason(reason: FinishReason | None, has_called: bool) -> str | None:
    return TOOL_CALLS if has_called and reason is FinishReason.STOP else reason


def _stop_reason(ended: Chunk | Choice) -> Json:
    """As vLLM tells it: which stop string or stop token id it was, once a choice has ended."""
    return {} if ended.finish_reason is None else {"stop_reason": ended.stop_reason}
