"""Which beams go on, which finish and when the search ends, with log-probabilities made up by hand."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest

from shoal_replica.beam_search import BeamSearch, num_candidates
from shoal_replica.executor import TokenLogprobs
from shoal_replica.finish_rule import FinishRule
from shoal_replica.request import FinishReason, Request
from shoal_replica.sampling_params import SamplingParams
from shoal_replica.testing import mix

END = 9


def search(**params: Any) -> BeamSearch:
    return BeamSearch(request(**params), FinishRule(frozenset({END}), 100))


def request(**params: Any) -> Request:
    return Request(
        request_id="r", prompt_token_ids=(1, 2), sampling_params=SamplingParams(**{"max_tokens": 9} | params)
    )


def tops(*beams: dict[int, float]) -> list[TokenLogprobs]:
    """For each beam its likeliest tokens with their log-probabilities."""
    made = [tuple(sorted(beam.items(), key=lambda item: -item[1])) for beam in beams]
    return [TokenLogprobs(*top[0], top) for top in made]


def beams(found: BeamSearch) -> list[tuple[tuple[int, ...], float]]:
    return [(beam.token_ids, beam.score) for beam in found.beams]


def finished(found: BeamSearch) -> list[tuple[int, ...]]:
    return [hypothesis.beam.token_ids for hypothesis in found.finished]


def test_the_best_continuations_of_all_beams_go_on() -> None:
    found = search(beam_width=2)
    assert found.advance(tops({3: -1.0, 4: -2.0, 5: -3.0})) == [0, 0]
    assert beams(found) == [((3,), -1.0), ((4,), -2.0)]
    assert found.advance(tops({5: -5.0, 6: -6.0}, {5: -0.5, 6: -1.5})) == [1, 1]
    assert beams(found) == [((4, 5), -2.5), ((4, 6), -3.5)]
    assert not found.is_done


def test_of_equals_the_better_beam_and_its_earlier_token_come_first() -> None:
    found = search(beam_width=3)
    found.advance(tops({3: -1.0, 4: -1.0, 5: -1.0}))
    assert [token_ids for token_ids, _ in beams(found)] == [(3,), (4,), (5,)]
    assert found.advance(tops({7: -1.0, 8: -1.0}, {7: -1.0}, {7: -1.0})) == [0, 0, 1]
    assert [token_ids for token_ids, _ in beams(found)] == [(3, 7), (3, 8), (4, 7)]


def test_of_finished_equals_the_earlier_one_comes_first() -> None:
    found = search(beam_width=2, length_penalty=0.0)
    found.advance(tops({END: -3.0, 3: -1.0, 4: -2.0}))
    assert finished(found) == []  # the third best may not finish where two are searched for
    found = search(beam_width=2, length_penalty=0.0)
    found.advance(tops({END: -2.0, 3: -1.0, 4: -5.0}))
    found.advance(tops({END: -1.0, 3: -9.0, 4: -9.5}, {3: -9.0, 4: -9.1, 5: -9.2}))
    assert finished(found) == [(END,), (3, END)]


def test_ends_leave_as_many_beams_as_before() -> None:
    """Each beam's likeliest tokens may all be ends: of each of them enough tokens must be known."""
    ends = (6, 7, 8)
    params = {"beam_width": 2, "stop_token_ids": ends}
    assert num_candidates(request(**params), FinishRule(frozenset({END}), 100)) == 2 + 4
    assert num_candidates(request(**params, ignore_eos=True), FinishRule(frozenset({END}), 100)) == 2 + 3
    assert num_candidates(request(beam_width=2), FinishRule(frozenset({8, END}), 100)) == 2 + 2
    assert num_candidates(request(), FinishRule(frozenset({END}), 100)) == 0
    found = search(**params)
    found.advance(tops({6: -1.0, 7: -1.1, 8: -1.2, END: -1.3, 3: -4.0, 4: -5.0}))
    assert finished(found) == [(6,), (7,)]
    assert beams(found) == [((3,), -4.0), ((4,), -5.0)]


@pytest.mark.parametrize(("score", "is_done"), [(-3.9, False), (-4.0, True), (-4.1, True)])
def test_a_search_ends_when_its_best_beam_cannot_replace_the_worst_finished_one(score: float, is_done: bool) -> None:
    """By the present length, as in transformers: here of two tokens, for which the worst has -2."""
    found = search(beam_width=2)
    found.advance(tops({END: -1.0, 3: -1.5, 4: -1.6}))
    found.advance(tops({END: -2.5, 3: score + 1.5, 4: -30.0}, {3: -30.0, 4: -31.0, 5: -32.0}))
    assert [hypothesis.rank_score for hypothesis in found.finished] == [-1.0, -2.0]
    assert beams(found)[0] == ((3, 3), score)
    assert beams(found)[1][1] < -4.0
    assert found.is_done is is_done


def test_an_early_end() -> None:
    for early_stopping in (False, True):
        found = search(beam_width=2, early_stopping=early_stopping)
        found.advance(tops({END: -5.0, 3: -1.0, 4: -6.0}))
        assert not found.is_done
        found.advance(tops({END: -5.0, 3: -0.1, 4: -9.0}, {3: -30.0, 4: -31.0, 5: -32.0}))
        assert len(found.finished) == 2
        assert found.is_done is early_stopping


def test_the_last_token_that_there_is_room_for_ends_all_beams() -> None:
    for params in ({"max_tokens": 2}, {"max_tokens": None}):
        rule = FinishRule(frozenset(), 4 if params["max_tokens"] is None else 100)
        found = BeamSearch(request(beam_width=2, **params), rule)
        found.advance(tops({3: -1.0, 4: -2.0}))
        assert not found.is_done
        found.advance(tops({3: -1.0, 4: -2.0}, {3: -3.0, 4: -3.5}))
        assert found.is_done
        assert finished(found) == [(3, 3), (3, 4)]
        assert {hypothesis.finish_reason for hypothesis in found.finished} == {FinishReason.LENGTH}


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, -2.0])
def test_a_search_wide_enough_finds_the_best_of_all_sequences(length_penalty: float) -> None:
    """Four tokens of a vocabulary of three, none of which ends: 81 sequences, of which it keeps all."""

    def scores(token_ids: tuple[int, ...]) -> dict[int, float]:
        state = 0
        for token_id in token_ids:
            state = mix(state, token_id)
        return {token_id: -(1 + mix(state, token_id) % 997) / 100 for token_id in range(3)}

    found = search(beam_width=81, max_tokens=4, length_penalty=length_penalty, ignore_eos=True)
    while not found.is_done:
        found.advance(tops(*(scores(beam.token_ids) for beam in found.beams)))
    totals = {s: sum(scores(s[:i])[s[i]] for i in range(4)) for s in product(range(3), repeat=4)}
    best = sorted(totals, key=lambda s: -totals[s])
    assert [hypothesis.rank_score for hypothesis in found.finished] == pytest.approx(
        [totals[s] / 4**length_penalty for s in best]
    )
    assert finished(found)[0] == best[0]
    assert len(set(finished(found))) == 81
    assert math.isclose(found.finished[0].beam.score, totals[best[0]])
