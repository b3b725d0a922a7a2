"""Text streams: stop strings are found wherever tokens cut them, and tokens are counted exactly."""

from __future__ import annotations

import msgspec
import pytest
from fixtures.tiny_tokenizer import EOS, tiny_tokenizer

from shoal_replica.executor import TokenLogprobs
from shoal_replica.request import FinishReason, TokenDelta
from shoal_replica.sampling_params import SamplingParams
from shoal_replica.text_stream import StopChecker, TextStream

TOKENIZER = tiny_tokenizer()


@pytest.mark.parametrize(
    ("stop", "pieces", "emitted"),
    [
        (("END",), ["abc", "E", "N", "Q"], ["abc", "", "", "ENQ"]),
        (("END",), ["abE", "NDxyz"], ["ab", ""]),
        (("END",), ["EEND"], ["E"]),
        (("aab",), ["a", "a", "a", "b"], ["", "", "a", ""]),
        (("abcd", "bc"), ["abc"], ["a"]),  # the stop string that ends first
        (("bc", "abc"), ["abc"], [""]),  # of those that end together, the longest
        (("\n\n",), ["one\n", "two\n", "\n"], ["one", "\ntwo", ""]),
        ((), ["anything"], ["anything"]),
    ],
)
def test_stop_checker(stop: tuple[str, ...], pieces: list[str], emitted: list[str]) -> None:
    checker = StopChecker(stop)
    assert [checker.push(piece) for piece in pieces] == emitted


def test_a_stop_that_is_part_of_the_text() -> None:
    """The longest of those that end together, as far as it was held back; nothing after it."""
    for stop, pieces, emitted in (
        (("END",), ["abE", "NDxyz", "more"], ["ab", "END", ""]),
        (("bc", "abc"), ["xabcd"], ["xabc"]),
        (("zz",), ["az", "b"], ["a", "zb"]),
    ):
        checker = StopChecker(stop, keeps=True)
        assert [checker.push(piece) for piece in pieces] == emitted
    ended = TokenDelta(
        request_id="", index=0, position=0, token_ids=(5, 6), num_cached_tokens=0, finish_reason=FinishReason.STOP
    )
    for is_included, count in ((False, 1), (True, 2)):
        params = SamplingParams(stop="the", include_stop_str_in_output=is_included)
        stream = TextStream.of(TOKENIZER, params, ())
        assert stream.take(ended) == (TOKENIZER.decode((5, 6)[:count]), ended)
        assert stream.push(TOKENIZER.encode(" in the end")) == (" in the" if is_included else " in ", True)


def test_what_has_ended_the_text_is_told() -> None:
    """The longest of those that end together; of tokens, only those that were asked for, and only at an end."""

    def last(reason: FinishReason | None, *token_ids: int) -> TokenDelta:
        return TokenDelta(
            request_id="", index=0, position=0, token_ids=token_ids, num_cached_tokens=0, finish_reason=reason
        )

    params = SamplingParams(stop=("he", "the"), stop_token_ids=(6,))
    stream = TextStream.of(TOKENIZER, params, ())
    for delta, told in (
        (last(FinishReason.STOP, 5, 6), 6),
        (last(FinishReason.STOP, 6, 5), None),
        (last(FinishReason.LENGTH, 6), None),
        (last(None, 6), None),
        (last(FinishReason.STOP), None),
    ):
        assert stream.stop_reason(delta) == told
    stream.push(TOKENIZER.encode("in the end"))
    assert stream.stop_reason(last(FinishReason.STOP, 5, 6)) == "the"


def test_special_tokens_are_text_if_asked_for() -> None:
    token_ids = TOKENIZER.encode(f"a{EOS}b")
    for skips, text in ((True, "ab"), (False, f"a{EOS}b")):
        stream = TextStream.of(TOKENIZER, SamplingParams(skip_special_tokens=skips), ())
        assert stream.push(token_ids)[0] + stream.finish() == text


def test_nothing_comes_after_a_stop() -> None:
    checker = StopChecker(("x",))
    assert (checker.push("axb"), checker.push("c"), checker.flush(), checker.stopped) == ("a", "", "", True)


def test_held_text_comes_at_the_end() -> None:
    stream = TextStream(TOKENIZER, ("stop",))
    assert stream.push(TOKENIZER.encode("do not sto")) == ("do not ", False)
    assert stream.finish() == "sto"
    assert stream.num_tokens == len(TOKENIZER.encode("do not sto"))


def test_tokens_after_the_stop_are_not_counted() -> None:
    stream = TextStream(TOKENIZER, ("the",))
    before, after = TOKENIZER.encode("in the"), TOKENIZER.encode(" end")
    assert stream.push(before + after) == ("in ", True)
    assert stream.num_tokens == len(before)
    assert stream.push(after) == ("", True)
    assert stream.num_tokens == len(before)
    assert stream.finish() == ""


def test_without_stop_all_is_passed_on() -> None:
    stream = TextStream(TOKENIZER)
    token_ids = TOKENIZER.encode("naïve 👧")
    text, stopped = stream.push(token_ids[:-1])
    assert (text, stopped) == ("naïve ", False)
    assert stream.push(token_ids[-1:]) == ("👧", False)
    assert stream.num_tokens == len(token_ids)


def test_an_unfinished_character_is_shown_at_the_end() -> None:
    stream = TextStream(TOKENIZER, ("zzz",))
    assert stream.push(TOKENIZER.encode("👧")[:2]) == ("", False)
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"


def test_a_delta_ends_with_the_token_that_completes_a_stop_string() -> None:
    """With its scores; and what is left of it says that it was stopped."""
    token_ids = tuple(TOKENIZER.encode("one two three four", add_special_tokens=False))
    scores = tuple(TokenLogprobs(token_id, -1.0) for token_id in token_ids)
    delta = TokenDelta(request_id="", index=0, position=0, token_ids=token_ids, num_cached_tokens=0, logprobs=scores)
    stream = TextStream.of(TOKENIZER, SamplingParams(stop="two"), ())
    text, told = stream.take(delta)
    count = len(told.token_ids)
    assert text == "one "
    assert "two" in TOKENIZER.decode(token_ids[:count])
    assert "two" not in TOKENIZER.decode(token_ids[: count - 1])
    assert (told.logprobs, told.finish_reason) == (scores[:count], FinishReason.STOP)
    assert stream.take(msgspec.structs.replace(delta, position=count))[1].token_ids == ()


def test_the_last_delta_brings_what_was_held_back() -> None:
    """Which may itself complete a stop string: the first bytes of a character that never comes."""
    token_ids = tuple(TOKENIZER.encode("👧")[:2])
    last = TokenDelta(
        request_id="",
        index=0,
        position=0,
        token_ids=token_ids,
        num_cached_tokens=0,
        finish_reason=FinishReason.LENGTH,
    )
    for stop, text, reason in (
        ("zzz", "\N{REPLACEMENT CHARACTER}", FinishReason.LENGTH),
        ("\N{REPLACEMENT CHARACTER}", "", FinishReason.STOP),
    ):
        stream = TextStream(TOKENIZER, (stop,))
        told = stream.take(last)
        assert told == (text, msgspec.structs.replace(last, finish_reason=reason))
