"""The beam searches under way: one sequence for each beam, and their blocks forked (copy-on-write) where beams part."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import groupby

from shoal_replica.beam_search import BeamSearch
from shoal_replica.errors import InvalidArgument
from shoal_replica.executor import SampledToken, TokenLogprobs
from shoal_replica.kv_cache import KVCacheManager
from shoal_replica.live_sequences import LiveSequences
from shoal_replica.request import FinishReason, FinishRule, Request, Sequence, SequenceStatus, StartTimes, TokenDelta
from shoal_replica.scheduling_policy import insert


class BeamGroup:
    """The sequences of one request, one for each of ``search.beams`` and in their order."""

    def __init__(self, search: BeamSearch, sequence: Sequence) -> None:
        self.search = search
        self.sequences = [sequence]
        self.tops: dict[int, TokenLogprobs] = {}  # by seq_id: what this step has found
        self.first_token_s: float | None = None

    @property
    def num_reserved_slots(self) -> int:
        """Slots kept for beams that are still to come."""
        return self._request.sampling_params.beam_width - len(self.sequences)

    @property
    def _request(self) -> Request:
        return self.sequences[0].request

    def answer(self) -> list[TokenDelta]:
        """The best finished beams, each as one delta."""
        first, start = self.sequences[0], None
        if first.first_scheduled_s is not None and self.first_token_s is not None:
            queue_s = first.first_scheduled_s - self._request.arrival_s
            start = StartTimes(queue_s, max(0.0, self.first_token_s - first.first_scheduled_s))
        return [
            TokenDelta(
                request_id=self._request.request_id,
                index=index,
                position=0,
                token_ids=beam.token_ids,
                num_cached_tokens=first.num_cached_tokens,
                start=start if index == 0 else None,
                logprobs=beam.logprobs,
                finish_reason=reason,
            )
            for index, (_, beam, reason) in enumerate(self.search.finished[: self._request.sampling_params.n])
        ]


class Beams:
    """All groups, from the admission of their first sequence until they end or are preempted. Clients get nothing of a
    search before its end, so one that is interrupted begins again from its prompt.

    Args:
        kv, live, running: the scheduler's own, as they change.
        end: ends a sequence and frees its blocks.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        live: LiveSequences,
        running: list[Sequence],
        policy: str,
        finish: FinishRule,
        end: Callable[[Sequence, FinishReason], None],
    ) -> None:
        self._chosen: list[tuple[int, int]] = []  # (seq_id, token) of which the executor has not been told
        self._groups: dict[str, BeamGroup] = {}
        self._kv = kv
        self._live = live
        self._running = running
        self._policy = policy
        self._finish = finish
        self._end = end

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def num_reserved_slots(self) -> int:
        return sum(group.num_reserved_slots for group in self._groups.values())

    def check(self, request: Request, max_num_seqs: int) -> None:
        """Raise InvalidArgument if a request's beams could not run together even if they were alone."""
        params = request.sampling_params
        if params.beam_width > max_num_seqs:
            limit = f"must be at most {max_num_seqs}, the sequences that a replica runs at once"
            raise InvalidArgument("beam_width", params.beam_width, limit)
        num_blocks, num_total = self._most_blocks(request), self._kv.pool.num_blocks
        if num_blocks > num_total:
            limit = f"{params.beam_width} beams of so many need {num_blocks} KV blocks of the replica's {num_total}"
            raise InvalidArgument("max_tokens", params.max_tokens, limit)

    def open(self, sequence: Sequence) -> None:
        """A request's first sequence starts to run: begin its search, if it is one."""
        request = sequence.request
        if request.sampling_params.is_beam_search:
            self._groups[request.request_id] = BeamGroup(BeamSearch(request, self._finish), sequence)

    def num_blocks_to_come(self, sequence: Sequence) -> int:
        """Blocks that have to be free, beside those that a waiting sequence needs, before it starts. They are what the
        beams of a preempted search may grow by: it begins again, and would lose all its work a second time.
        """
        if not sequence.num_preemptions or not sequence.request.sampling_params.is_beam_search:
            return 0
        return self._most_blocks(sequence.request) - self._kv.num_blocks_for(sequence.num_tokens + 1)

    def close(self, request_id: str) -> None:
        """Forget a request that has ended; unknown ones are ignored."""
        self._groups.pop(request_id, None)

    def collapse(self, sequence: Sequence) -> Sequence:
        """End all beams of a group but one, which has only its prompt left. Another sequence is returned as it is."""
        group = self._groups.pop(sequence.request.request_id, None)
        if group is None:
            return sequence
        kept, *others = group.sequences
        for other in others:
            self._end(other, FinishReason.ABORT)
        kept.token_ids = kept.request.known_token_ids()
        del kept.block_hashes[kept.num_prompt_tokens // self._kv.block_size :]
        return kept

    def units(self, level: Iterable[Sequence]) -> list[list[Sequence]]:
        """Decoding sequences in rank order, as they must be computed: the beams of a group in the same step."""
        by_unit = groupby(level, key=lambda s: s.request.request_id if self._has(s) else s.seq_id)
        return [list(unit) for _, unit in by_unit]

    def take(self, sequence: Sequence, token: SampledToken) -> bool:
        """Note what a step has found for a beam. False if the sequence is not one."""
        if not self._has(sequence):
            return False
        assert token.logprobs is not None
        self._groups[sequence.request.request_id].tops[sequence.seq_id] = token.logprobs
        return True

    def take_chosen(self, dropped_seq_ids: Collection[int]) -> tuple[tuple[int, int], ...]:
        """The tokens, as (sequence, token), that were chosen since the last call, without those of dropped beams."""
        chosen, self._chosen = self._chosen, []
        return tuple(pair for pair in chosen if pair[0] not in dropped_seq_ids)

    def advance(self, now: float) -> list[TokenDelta]:
        """Choose the next beams of all groups of which a step has computed the present ones."""
        deltas: list[TokenDelta] = []
        for group in [group for group in self._groups.values() if group.tops]:
            if group.first_token_s is None:
                group.first_token_s = now
            tops, group.tops = [group.tops[s.seq_id] for s in group.sequences], {}
            places = group.search.advance(tops)
            if group.search.is_done:
                deltas += group.answer()
                self._end_all(group.sequences, FinishReason.STOP)
            else:
                self._branch(group, places)
        return deltas

    def abort(self, request_id: str, reason: FinishReason) -> list[TokenDelta]:
        """End a beam search, waiting or running, and free its blocks."""
        sequences = self._live.of(request_id)
        request, num_cached = sequences[0].request, sequences[0].num_cached_tokens
        self._end_all(sequences, reason)
        return [
            TokenDelta(
                request_id=request_id,
                index=index,
                position=0,
                token_ids=(),
                num_cached_tokens=num_cached,
                finish_reason=reason,
            )
            for index in range(request.sampling_params.n)
        ]

    def check_invariants(self) -> None:
        """The sequences of a group are level with each other, and have its beams' tokens."""
        for request_id, group in self._groups.items():
            assert {s.seq_id for s in group.sequences} == {s.seq_id for s in self._live.of(request_id)}
            assert not group.tops
            assert group.num_reserved_slots >= 0
            for sequence, beam in zip(group.sequences, group.search.beams, strict=True):
                assert sequence.status is SequenceStatus.RUNNING
                assert tuple(sequence.token_ids[sequence.num_prompt_tokens :]) == beam.token_ids

    def _most_blocks(self, request: Request) -> int:
        """Blocks of a request whose beams share nothing but their prompt, at their full length."""
        params, room = request.sampling_params, self._finish.max_model_len - request.num_prompt_tokens
        num_tokens = room if params.max_tokens is None else min(room, params.max_tokens)
        num_shared = request.num_prompt_tokens // self._kv.block_size
        num_own = self._kv.num_blocks_for(request.num_prompt_tokens + num_tokens) - num_shared
        return num_shared + params.beam_width * num_own

    def _has(self, sequence: Sequence) -> bool:
        return sequence.request.request_id in self._groups

    def _end_all(self, sequences: Iterable[Sequence], reason: FinishReason) -> None:
        for sequence in tuple(sequences):
            self._end(sequence, reason)

    def _branch(self, group: BeamGroup, places: list[int]) -> None:
        """Give each of the search's new beams a sequence: that of the beam it continues, or a fork of it."""
        before = group.sequences
        self._end_all((s for place, s in enumerate(before) if place not in places), FinishReason.STOP)
        group.sequences = []
        for number, place in enumerate(places):
            is_fork = place in places[:number]
            group.sequences.append(self._fork(before[place]) if is_fork else before[place])
        for sequence, beam in zip(group.sequences, group.search.beams, strict=True):
            token_id = beam.token_ids[-1]
            sequence.token_ids.append(token_id)
            if sequence in before:
                self._chosen.append((sequence.seq_id, token_id))

    def _fork(self, parent: Sequence) -> Sequence:
        """A running sequence with the same tokens and blocks, at the same rank."""
        child = self._live.start(parent.request, parent.index)
        child.order = parent.order
        child.token_ids = list(parent.token_ids)
        child.block_hashes = list(parent.block_hashes)
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_cached_tokens = parent.num_cached_tokens
        child.first_scheduled_s = parent.first_scheduled_s
        self._kv.fork(parent.seq_id, child.seq_id)
        child.move(SequenceStatus.RUNNING)
        insert(self._running, child, self._policy)
        return child
