"""What a call's client is to get: the text and tokens of each sequence, in chunks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from shoal_cluster.serve.call import Chunk
from shoal_replica.request import TokenDelta
from shoal_replica.text_stream import TextStream

MAX_MERGED = 256  # tokens in a message, or few more: with 20 log-probabilities each, 80 KB of a client's 4 MiB


@dataclass(slots=True)
class Output:
    """One sequence of a call, as far as its client has it or will have it from the chunks that are there."""

    text_stream: TextStream
    token_ids: list[int] = field(default_factory=list)
    is_done: bool = False


class Outputs:
    """The sequences of a call, and the chunks that its client has not read yet. Owned by a ``Generation``.

    Attributes:
        sequences: by index.
    """

    def __init__(self, texts: Iterable[TextStream]) -> None:
        self.sequences = [Output(text) for text in texts]
        self._chunks: deque[Chunk] = deque()

    @property
    def is_done(self) -> bool:
        """Whether all sequences have ended; there may be chunks left."""
        return all(output.is_done for output in self.sequences)

    @property
    def num_tokens(self) -> int:
        """Output tokens so far."""
        return sum(len(output.token_ids) for output in self.sequences)

    @property
    def has_chunks(self) -> bool:
        """Whether there is something to read."""
        return bool(self._chunks)

    def take(self, delta: TokenDelta) -> bool:
        """Make chunks of a delta that continues its sequence. Returns whether a stop string has ended that one: its
        replica may be going on.
        """
        output, was_stopped = self.sequences[delta.index], False
        for start in range(0, len(delta.prompt_logprobs), MAX_MERGED):
            piece_of_prompt = delta.prompt_logprobs[start : start + MAX_MERGED]
            self._chunks.append(Chunk(index=delta.index, prompt_logprobs=piece_of_prompt))
        for piece in delta.pieces(MAX_MERGED):
            if not output.is_done:  # else a stop string has ended it within the delta
                was_stopped |= self._add(output, piece)
        return was_stopped

    def _add(self, output: Output, delta: TokenDelta) -> bool:
        """Make one chunk. Returns whether a stop string has ended the sequence before the replica did."""
        was_live = delta.finish_reason is None
        text, delta = output.text_stream.take(delta)
        output.token_ids.extend(delta.token_ids)
        finish_reason = delta.finish_reason
        if finish_reason is not None:
            output.is_done = True
        if delta.token_ids or finish_reason is not None:  # else a beam search has begun to find tokens
            self._chunks.append(
                Chunk(
                    index=delta.index,
                    text=text,
                    token_ids=delta.token_ids,
                    logprobs=delta.logprobs,
                    finish_reason=finish_reason,
                    stop_reason=None if finish_reason is None else output.text_stream.stop_reason(delta),
                )
            )
        return output.text_stream.stopped and was_live

    def next_chunk(self) -> Chunk:
        """The oldest chunk, merged with those of its sequence right behind it: a client or gateway that is slower than
        the tokens gets several at once and falls no further behind.
        """
        first = self._chunks.popleft()
        chunks = [first]
        num_tokens = len(first.token_ids) + len(first.prompt_logprobs)
        while self._chunks and self._chunks[0].index == first.index and num_tokens < MAX_MERGED:
            chunks.append(self._chunks.popleft())
            num_tokens += len(chunks[-1].token_ids)
        return first if len(chunks) == 1 else Chunk.joined(chunks)
