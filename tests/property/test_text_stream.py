"""However tokens are split into pushes, the stream's text is that of decoding at once, up to the first stop string."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from fixtures.tiny_tokenizer import EOS, byte_fallback_tokenizer, tiny_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from shoal_replica.text_stream import StopChecker, TextStream

TOKENIZER = tiny_tokenizer()
EOS_ID = TOKENIZER.encode(EOS)[0]
any_tokens = st.lists(st.integers(0, TOKENIZER.vocab_size + 3), max_size=60).map(tuple)
text_tokens = st.text(st.sampled_from("abthe in日👧é\n"), max_size=40).map(TOKENIZER.encode)
broken_tokens = st.lists(st.sampled_from([*TOKENIZER.encode("é👧日"), EOS_ID]), max_size=60).map(tuple)
tokens = any_tokens | text_tokens | broken_tokens
BYTE_FALLBACK = byte_fallback_tokenizer()
NUM_BYTES = 257  # with <unk>
byte_tokens = st.text("aé日👧🏽 ", max_size=6).map(lambda text: [1 + byte for byte in text.encode()])
piece_tokens = st.lists(st.integers(NUM_BYTES, BYTE_FALLBACK.vocab_size - 1), max_size=4)
stray_tokens = st.lists(st.integers(1, BYTE_FALLBACK.vocab_size - 1), max_size=4)
fallback_tokens = st.lists(byte_tokens | piece_tokens | stray_tokens, max_size=8).map(lambda runs: [*chain(*runs)])
stops = st.lists(st.text(st.sampled_from("abthe日\N{REPLACEMENT CHARACTER}"), min_size=1, max_size=4), max_size=3).map(
    tuple
)


def cut(data: st.DataObject, items: Sequence[int] | str) -> list[Sequence[int] | str]:
    """``items``, cut at random places."""
    places = sorted(data.draw(st.lists(st.integers(0, len(items)), max_size=12)))
    return [items[a:b] for a, b in zip([0, *places], [*places, len(items)], strict=True)]


def until_stop(text: str, stop: tuple[str, ...], keeps: bool = False) -> str:
    """The dumb oracle: try every end, and at it the longest stop string first."""
    for end in range(1, len(text) + 1):
        for candidate in sorted(stop, key=len, reverse=True):
            if text[:end].endswith(candidate):
                return text[: end if keeps else end - len(candidate)]
    return text


@given(st.data(), tokens, stops, st.booleans())
def test_stream_equals_decoding_at_once(
    data: st.DataObject, token_ids: tuple[int, ...], stop: tuple[str, ...], keeps: bool
) -> None:
    stream = TextStream(TOKENIZER, stop, includes_stop=keeps)
    text = "".join(stream.push(piece)[0] for piece in cut(data, token_ids)) + stream.finish()
    assert text == until_stop(TOKENIZER.decode(token_ids), stop, keeps)


def spelled(token_ids: Sequence[int]) -> str:
    """The dumb oracle for text that continues a prompt: the bytes of all tokens, joined."""
    return b"".join([BYTE_FALLBACK.token_bytes(token_id) for token_id in token_ids]).decode(errors="replace")


@given(st.data(), piece_tokens | fallback_tokens, fallback_tokens, stops)
def test_stream_of_byte_tokens_goes_on_after_its_prompt(
    data: st.DataObject, before: list[int], token_ids: list[int], stop: tuple[str, ...]
) -> None:
    prompt = [*before, BYTE_FALLBACK.vocab_size - 1]  # a whole character
    stream = TextStream(BYTE_FALLBACK, stop, prompt)
    text = "".join(stream.push(piece)[0] for piece in cut(data, token_ids)) + stream.finish()
    assert text == until_stop(spelled(token_ids), stop)


@given(st.data(), st.lists(byte_tokens | piece_tokens, max_size=8))
def test_stream_of_byte_tokens_equals_decoding_at_once(data: st.DataObject, runs: list[list[int]]) -> None:
    token_ids = [BYTE_FALLBACK.vocab_size - 1, *chain(*runs)]
    stream = TextStream(BYTE_FALLBACK)
    text = "".join(stream.push(piece)[0] for piece in cut(data, token_ids)) + stream.finish()
    assert text == BYTE_FALLBACK.decode(token_ids)


@given(tokens, tokens)
def test_a_prompt_changes_nothing_where_tokens_spell_alike_anywhere(
    prompt: tuple[int, ...], token_ids: tuple[int, ...]
) -> None:
    stream = TextStream(TOKENIZER, (), prompt)
    assert stream.push(token_ids)[0] + stream.finish() == TOKENIZER.decode(token_ids)


@given(st.data(), tokens, stops)
def test_count_does_not_depend_on_the_cuts(
    data: st.DataObject, token_ids: tuple[int, ...], stop: tuple[str, ...]
) -> None:
    stream, at_once = TextStream(TOKENIZER, stop), TextStream(TOKENIZER, stop)
    for piece in cut(data, token_ids):
        stream.push(piece)
    at_once.push(token_ids)
    assert (stream.num_tokens, stream.stopped) == (at_once.num_tokens, at_once.stopped)


@given(st.data(), st.text("ab", max_size=40), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3).map(tuple))
def test_nothing_emitted_is_ever_taken_back(data: st.DataObject, text: str, stop: tuple[str, ...]) -> None:
    checker = StopChecker(stop)
    emitted, sure = "", until_stop(text, stop)
    for piece in cut(data, text):
        emitted += checker.push(str(piece))
        assert sure.startswith(emitted)
    assert emitted + checker.flush() == sure
