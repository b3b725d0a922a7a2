"""Tells the text of answers apart as it comes, for all sequences of a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shoal_cluster.chat.answer_pieces import AnswerPiece
from shoal_cluster.chat.answer_reader import AnswerReader
from shoal_cluster.serve.call import Chunk
from shoal_replica.request import FinishReason


class AnswerReaders:
    """Tells each sequence's chunks apart into content, reasoning and tool calls."""

    def __init__(self, readers: Sequence[AnswerReader]) -> None:
        self._readers = readers
        self._num_reasoning_tokens = 0.0

    def read(self, chunk: Chunk) -> list[Chunk]:
        """``chunk`` with its text told apart: several, if it has parts in another order than a chunk has."""
        if not self._readers:
            return [chunk]
        reader = self._readers[chunk.index]
        num_thought = reader.num_thought
        # Only the model ends a call; a limit or a stop string of the client's cuts it.
        is_cut = chunk.finish_reason is not FinishReason.STOP or isinstance(chunk.stop_reason, str)
        pieces = reader.push(chunk.text, is_last=chunk.finish_reason is not None, is_cut=is_cut)
        first, *others = pieces or (AnswerPiece(),)
        # A chunk has as many tokens as have come together: in one where reasoning ends, they count by their text.
        share = (reader.num_thought - num_thought) / len(chunk.text) if chunk.text else reader.is_reasoning
        share = min(1.0, share)  # what was held before it was known to be reasoning is not counted
        self._num_reasoning_tokens += len(chunk.token_ids) * share
        usage = chunk.usage
        if usage is not None:
            usage = replace(usage, num_reasoning_tokens=round(self._num_reasoning_tokens))
        chunks = [
            Chunk(
                index=chunk.index,
                text=first.content,
                reasoning=first.reasoning,
                tool_calls=first.calls,
                token_ids=chunk.token_ids,
                logprobs=chunk.logprobs,
                prompt_logprobs=chunk.prompt_logprobs,
                prompt=chunk.prompt,
            )
        ]
        for piece in others:
            chunks.append(
                Chunk(index=chunk.index, text=piece.content, reasoning=piece.reasoning, tool_calls=piece.calls)
            )
        chunks[-1] = replace(chunks[-1], finish_reason=chunk.finish_reason, stop_reason=chunk.stop_reason, usage=usage)
        return chunks
