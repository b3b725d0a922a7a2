"""The sequences that have not ended, by their ids and by request."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items

from shoal_replica.request import Request, Sequence


class LiveSequences:
    """Numbers sequences, and keeps them from ``start`` to ``end``.

    Attributes:
        by_id: every live sequence.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, Sequence] = {}
        self.by_id: Mapping[int, Sequence] = self._by_id
        self._by_request: dict[str, list[Sequence]] = {}
        self._next_id = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_request

    def request_ids(self) -> list[str]:
        """Ids of all requests, oldest first."""
        return list(self._by_request)

    def may_leave(self, request_id: str, also_started: bool = False) -> bool:
        """Whether another replica could run a request instead: it is live, and nothing of it has been computed or, with
        ``also_started``, what has come of it can be continued. A beam search would begin again.
        """
        own = self.of(request_id)
        if not own or own[0].first_scheduled_s is None:
            return bool(own)
        return also_started and not own[0].request.sampling_params.is_beam_search

    def of(self, request_id: str) -> Items[Sequence]:
        """The live sequences of a request, oldest first."""
        return self._by_request.get(request_id, ())

    def start(self, request: Request, index: int) -> Sequence:
        """A new sequence with the tokens that the request starts with."""
        sequence = Sequence(
            seq_id=self._next_id,
            request=request,
            index=index,
            token_ids=request.known_token_ids(),
            block_hashes=list(request.block_hashes),
        )
        self._next_id += 1
        self._by_request.setdefault(request.request_id, []).append(sequence)
        self._by_id[sequence.seq_id] = sequence
        return sequence

    def end(self, sequence: Sequence) -> bool:
        """Forget a sequence. True if it was the last of its request."""
        del self._by_id[sequence.seq_id]
        request_id = sequence.request.request_id
        own = self._by_request[request_id]
        own.remove(sequence)
        if own:
            return False
        del self._by_request[request_id]
        return True

    def check_invariants(self) -> None:
        """Both tables hold the same sequences."""
        assert self._by_id.keys() == {s.seq_id for own in self._by_request.values() for s in own}
