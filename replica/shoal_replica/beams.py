"""The beam searches under way: one sequence for each beam, and their blocks forked (copy-on-write) where beams part."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import groupby
from typing import Any

from shoal_replica.beam_search import BeamSearch
from shoal_replica.errors import InvalidArgument
from shoal_replica.executor import SampledToken, TokenLogprobs
from shoal_replica.finish_rule import FinishRule
from shoal_replica.kv_cache import KVCacheManager
from shoal_replica.live_sequences import LiveSequences
from shoal_replica.request import FinishReason, Request, Sequence, SequenceStatus, StartTimes, TokenDelta
from shoal_replica.request_checks import MAX_LOGPROBS_TOLD
from shoal_replica.scheduling_policy import insert


class BeamGroup:
    """The sequences of one request, one for each of ``search.beams`` and in their order."""

    def __init__(self, search: BeamSearch, sequence: Sequence) -> None:
        self.search = search
        self.sequences = [sequence]
        self.tops: dict[int, TokenLogprobs] = {}  # by seq_id: what this step has found

    @property
    def num_reserved_slots(self) -> int:
        """Slots kept for beams that are still to come."""
        return self._request.sampling_params.beam_width - len(self.sequences)

    @property
    def _request(self) -> Request:
        return self.sequences[0].request

    def start(self, now: float) -> TokenDelta:
        """A delta without tokens, by which others learn at ``now`` that the prompt has been computed."""
        first_s = self.sequences[0].first_scheduled_s
        assert first_s is not None
        return self._delta(0, start=StartTimes(first_s - self._request.arrival_s, max(0.0, now - first_s)))

    def answer(self) -> list[TokenDelta]:
        """The best finished beams, each as one delta. Where the vocabulary is so small that there are fewer than were
        asked for, the others are empty.
        """
        found = self.search.finished[: self._request.sampling_params.n]
        deltas = [
            self._delta(index, token_ids=beam.token_ids, logprobs=beam.logprobs, finish_reason=reason)
            for index, (_, beam, reason) in enumerate(found)
        ]
        return deltas + self.end(FinishReason.LENGTH)[len(found) :]

    def end(self, reason: FinishReason) -> list[TokenDelta]:
        """The end of all answers, none of which has any tokens."""
        return [self._delta(index, finish_reason=reason) for index in range(self._request.sampling_params.n)]

    def _delta(self, index: int, **fields: Any) -> TokenDelta:
        first = self.sequences[0]
        told: dict[str, Any] = {"token_ids": (), "num_cached_tokens": first.num_cached_tokens} | fields
        return TokenDelta(request_id=first.request.request_id, index=index, position=0, **told)


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
        self._started: set[str] = set()  # requests of whose start others have been told; preempted ones stay
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
        """Raise InvalidArgument if a request's beams could not run together even if they were alone, or its answer,
        which comes all at once, would be too large.
        """
        params = request.sampling_params
        if not params.is_beam_search:
            return
        if params.beam_width > max_num_seqs:
            limit = f"must be at most {max_num_seqs}, the sequences that a replica runs at once"
            raise InvalidArgument("beam_width", params.beam_width, limit)
        num_blocks, num_total = self._most_blocks(request), self._kv.pool.num_blocks
        if num_blocks > num_total:
            beams = f"{params.beam_width} beams of up to {self._most_tokens(request)} tokens"
            limit = f"must be lower: {beams} need {num_blocks} KV blocks of the replica's {num_total}"
            raise InvalidArgument("max_tokens", params.max_tokens, limit)
        if params.logprobs is not None:
            num_entries = params.n * self._most_tokens(request) * (1 + params.logprobs)
            if num_entries > MAX_LOGPROBS_TOLD:
                limit = (
                    f"{params.n} beams would have up to {num_entries} of them, and at most {MAX_LOGPROBS_TOLD} are sent"
                )
                raise InvalidArgument("logprobs", params.logprobs, limit)

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
        return max(0, self._most_blocks(sequence.request) - self._kv.num_blocks_for(sequence.num_tokens + 1))

    def close(self, request_id: str) -> None:
        """Forget a request that has ended; unknown ones are ignored."""
        self._groups.pop(request_id, None)
        self._started.discard(request_id)

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
            request_id = group.sequences[0].request.request_id
            if request_id not in self._started:
                self._started.add(request_id)
                deltas.append(group.start(now))
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
        deltas = BeamGroup(BeamSearch(sequences[0].request, self._finish), sequences[0]).end(reason)
        self._end_all(sequences, reason)
        return deltas

    def check_invariants(self) -> None:
        """The sequences of a group are level with each other, and have its beams' tokens."""
        assert all(request_id in self._live for request_id in self._started)
        for request_id, group in self._groups.items():
            assert {s.seq_id for s in group.sequences} == {s.seq_id for s in self._live.of(request_id)}
            assert not group.tops
            assert group.num_reserved_slots >= 0
            for sequence, beam in zip(group.sequences, group.search.beams, strict=True):
                assert sequence.status is SequenceStatus.RUNNING
                assert tuple(sequence.token_ids[sequence.num_prompt_tokens :]) == beam.token_ids

    def _most_blocks(self, request: Request) -> int:
        """Blocks of a request whose beams share nothing but their prompt, at their full length."""
        num_shared = request.num_prompt_tokens // self._kv.block_size
        num_computed = request.num_prompt_tokens + self._most_tokens(request) - 1  # the last one never is
        num_own = self._kv.num_blocks_for(num_computed) - num_shared
        return num_shared + request.sampling_params.beam_width * num_own

    def _most_tokens(self, request: Request) -> int:
        """Output tokens of each beam, at most."""
        room, wanted = self._finish.max_model_len - request.num_prompt_tokens, request.sampling_params.max_tokens
        return room if wanted is None else min(room, wanted)

    def _has(self, sequence: Sequence) -> bool:
        return sequence.request.request_id in self._groups

    def _end_all(self, sequences: Iterable[Sequence], reason: FinishReason) -> None:
        for sequence in tuple(sequences):
            self._end(sequence, reason)

    def _branch(self, group: BeamGroup, places: list[int]) -> None:
        """Give each of the search's new beams a sequence: that of the beam it continues, or a fork of it."""
        left = dict(enumerate(group.sequences))  # by place: those that no new beam has been given
        parents = [left[place] for place in places]
        self._end_all([left[place] for place in left.keys() - places], FinishReason.STOP)
        group.sequences, chosen = [], []
        for place, parent, beam in zip(places, parents, group.search.beams, strict=True):
            sequence = left.pop(place, None)
            if sequence is not None:
                chosen.append((sequence.seq_id, beam.token_ids[-1]))
            group.sequences.append(sequence or self._fork(parent))
        for sequence, beam in zip(group.sequences, group.search.beams, strict=True):
            sequence.token_ids.append(beam.token_ids[-1])
        self._chosen += chosen

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
