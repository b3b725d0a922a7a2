"""However tokens are cut into pushes, a stream's text is the text decoded at once, up to the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

from fixtures.tiny_tokenizer import EOS, tiny_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from shoal_replica.text_stream import StopChecker, TextStream

TOKENIZER = tiny_tokenizer()
EOS_ID = TOKENIZER.encode(EOS)[0]
any_tokens = st.lists(st.integers(0, TOKENIZER.vocab_size + 3), max_size=60).map(tuple)
text_tokens = st.text(st.sampled_from("abthe in日👧é\n"), max_size=40).map(TOKENIZER.encode)
broken_tokens = st.lists(st.sampled_from([*TOKENIZER.encode("é👧日"), EOS_ID]), max_size=60).map(tuple)
tokens = any_tokens | text_tokens | broken_tokens
stops = st.lists(st.text(st.sampled_from("abthe日\N{REPLACEMENT CHARACTER}"), min_size=1, max_size=4), max_size=3).map(
    tuple
)


def cut(data: st.DataObject, items: Sequence[int] | str) -> list[Sequence[int] | str]:
    """``items`` cut at drawn places."""
    places = sorted(data.draw(st.lists(st.integers(0, len(items)), max_size=12)))
    return [items[a:b] for a, b in zip([0, *places], [*places, len(items)], strict=True)]


def until_stop(text: str, stop: tuple[str, ...]) -> str:
    """The dumb oracle: try every end, and at it the longest stop string first."""
    for end in range(1, len(text) + 1):
        for candidate in sorted(stop, key=len, reverse=True):
            if text[:end].endswith(candidate):
                return text[: end - len(candidate)]
    return text


@given(st.data(), tokens, stops)
def test_stream_equals_decoding_at_once(data: st.DataObject, token_ids: tuple[int, ...], stop: tuple[str, ...]) -> None:
    stream = TextStream(TOKENIZER, stop)
    text = "".join(stream.push(piece)[0] for piece in cut(data, token_ids)) + stream.finish()
    assert text == until_stop(TOKENIZER.decode(token_ids), stop)


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
