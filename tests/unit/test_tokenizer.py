"""The tokenizer with a tiny byte-level BPE: round trips, chat templates, and files that may be missing."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from fixtures.tiny_tokenizer import BOS, EOS, tiny_tokenizer, write_tiny_tokenizer

from shoal_replica.chat_template import RESERVED, PromptEnd, Turn
from shoal_replica.detokenizer import IncrementalDetokenizer
from shoal_replica.errors import ConfigError, InvalidArgument, NotFound
from shoal_replica.tokenizer import Tokenizer

TEXTS = [
    "Hello, world!",
    "naïve café",
    "日本語のテキスト",
    "👩‍👩‍👧 family 🏳️‍🌈",
    "tabs\tand\nnewlines  ",
    "\N{REPLACEMENT CHARACTER}?",
    "",
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(write_tiny_tokenizer(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize("text", TEXTS)
def test_decode_undoes_encode(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_token_bytes_spell_the_text(tokenizer: Tokenizer, text: str) -> None:
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()


def test_special_tokens_are_skipped_on_demand(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode(f"a{EOS}b")
    assert tokenizer.decode(token_ids) == "ab"
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == f"a{EOS}b"
    assert EOS.encode() in map(tokenizer.token_bytes, token_ids)


def test_ids_beyond_the_vocabulary_have_no_text(tokenizer: Tokenizer) -> None:
    beyond = tokenizer.vocab_size + 7
    assert tokenizer.token_bytes(beyond) == b""
    assert tokenizer.decode((*tokenizer.encode("a"), beyond)) == "a"


def test_lone_surrogate_is_an_invalid_argument(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidArgument, match=r"text: .*Unicode"):
        tokenizer.encode("a\ud800b")


def test_sentencepiece_pieces_have_bytes() -> None:
    model = tokenizers.models.BPE(
        {"<0xE2>": 0, "\u2581hello": 1, "<unk>": 2}, [], unk_token="<unk>", byte_fallback=True
    )
    tokenizer = Tokenizer(tokenizers.Tokenizer(model))
    assert [tokenizer.token_bytes(i) for i in range(2)] == [b"\xe2", b" hello"]


def test_chat_template_renders_as_transformers_does(tokenizer: Tokenizer) -> None:
    text = tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be brief <&>."}, {"role": "user", "content": "Hi"}]
    )
    assert text == f"<s><|system|>\nBe brief <&>.{EOS}\n<|user|>\nHi{EOS}\n<|assistant|>\n"


CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " Well, I "}]


@pytest.mark.parametrize(
    ("turns", "template", "words"),
    [
        ([CHAT[0], {"role": "assistant"}], "{{ messages[0].content }}", "has no text to go on with"),
        ([], "{{ 1 }}", "has no text to go on with"),
        (CHAT, "{{ messages[-1].content | lower }}", "does not show the last message as it is"),
        (CHAT, "{{ messages[0].content }}", "does not show the last message as it is"),
    ],
)
def test_a_message_that_cannot_be_continued(tmp_path: Path, turns: list[Turn], template: str, words: str) -> None:
    tokenizer = Tokenizer.from_folder(write_tiny_tokenizer(tmp_path, chat_template=template))
    with pytest.raises(InvalidArgument, match=f"continue_final_message: .*{words}"):
        tokenizer.apply_chat_template(turns, end=PromptEnd.CONTINUED)


def test_how_a_prompt_ends_may_be_a_word(tokenizer: Tokenizer) -> None:
    for end in PromptEnd:
        text = tokenizer.apply_chat_template(CHAT, end=end.value)  # type: ignore[arg-type]
        assert text == tokenizer.apply_chat_template(CHAT, end=end)
    with pytest.raises(InvalidArgument, match="end: got 'open'; must be one of answer, closed, continued"):
        tokenizer.apply_chat_template(CHAT, end="open")  # type: ignore[arg-type]


def test_template_refusal_names_the_messages(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidArgument, match=r"messages: .*tool.*unknown role tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}])


def test_template_cannot_reach_python(tmp_path: Path) -> None:
    folder = write_tiny_tokenizer(tmp_path, chat_template="{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(InvalidArgument, match="messages"):
        Tokenizer.from_folder(folder).apply_chat_template([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content | tojson }}{% endfor %}",
        "{% generation %}{{ messages[0]['content'] | tojson }}{% endgeneration %}",
    ],
)
def test_template_extensions_of_transformers(tmp_path: Path, template: str) -> None:
    tokenizer = Tokenizer.from_folder(write_tiny_tokenizer(tmp_path, chat_template=template))
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "é<b>"}, {"role": "user", "content": "2"}])
        == '"é<b>"'
    )


def test_template_file_wins_over_the_config(tmp_path: Path) -> None:
    folder = write_tiny_tokenizer(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ eos_token }}{% if add_generation_prompt %}!{% endif %}")
    assert Tokenizer.from_folder(folder).apply_chat_template([{"role": "user", "content": "x"}]) == f"{EOS}!"


def test_the_template_named_default_is_taken(tmp_path: Path) -> None:
    folder = write_tiny_tokenizer(tmp_path)
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert Tokenizer.from_folder(folder).apply_chat_template([{"role": "user", "content": "x"}]) == "plain"


def test_tools_have_the_template_named_for_them(tmp_path: Path) -> None:
    folder = write_tiny_tokenizer(tmp_path)
    templates = [{"name": "tool_use", "template": "{{ tools[0].a }}"}, {"name": "default", "template": "plain"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert Tokenizer.from_folder(folder).apply_chat_template([{"role": "user", "content": "x"}], [{"a": "b"}]) == "b"


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_a_clients_options_leave_what_is_not_its_alone(tokenizer: Tokenizer, name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"template_options: got .*{name}.*cannot be set"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], options={name: 1})


@pytest.mark.parametrize(
    ("template", "options"),
    [
        ("{{ 1 // a }}", {"a": 0}),
        ("{{ a.b.c }}", {}),
        ("{{ a | tojson(indent=10**9) }}", {"a": [1]}),
        ("{{ 2.0 ** a }}", {"a": 10**6}),
        ("{{ a }}" * 40, {"a": "x" * 10**6}),
        ("{{ raise_exception('no') }}", {"self": 1}),
    ],
)
def test_what_a_template_cannot_do_is_the_clients_error(tmp_path: Path, template: str, options: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_folder(write_tiny_tokenizer(tmp_path, chat_template=template))
    with pytest.raises(InvalidArgument, match=r"messages: .*the model's chat template refuses them"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], options=options)


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", None])
def test_a_turn_without_a_role_is_the_clients_error(tmp_path: Path, template: str | None) -> None:
    folder = write_tiny_tokenizer(tmp_path, chat_template=template or "")
    if template is None:
        (folder / "tokenizer_config.json").unlink()
    with pytest.raises(InvalidArgument, match=r"messages: got \[None\]"):
        Tokenizer.from_folder(folder).apply_chat_template([{"content": "x"}])


def test_special_tokens_that_are_shown_are_text() -> None:
    tokenizer = tiny_tokenizer()
    bos, eos = (tokenizer.token_id(text) or 0 for text in (BOS, EOS))
    assert tokenizer.special_ids([BOS, "the", "nothing"]) == {bos}
    detokenizer = IncrementalDetokenizer(tokenizer, shown=frozenset({bos}))
    token_ids = [*tokenizer.encode("a", add_special_tokens=False), bos, eos, *tokenizer.encode("é")[-2:]]
    assert "".join(detokenizer.push((token_id,)) for token_id in token_ids) == f"a{BOS}é"


def test_without_template_messages_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_tokenizer(tmp_path)
    (folder / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.chat_template is None
    with pytest.raises(InvalidArgument, match=r"messages: .*no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not a tokenizer"):
        Tokenizer.from_folder(tmp_path)
    folder = write_tiny_tokenizer(tmp_path, chat_template="{% if %}")
    with pytest.raises(ConfigError, match="chat template: line 1"):
        Tokenizer.from_folder(folder)


def test_detokenizer_holds_back_unfinished_characters() -> None:
    tokenizer = tiny_tokenizer()
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.push((token_id,)) for token_id in tokenizer.encode("👧é")]
    assert pieces == ["", "", "", "👧", "", "é"]
    assert detokenizer.flush() == ""


def test_detokenizer_shows_what_stays_unfinished() -> None:
    tokenizer = tiny_tokenizer()
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.push(tokenizer.encode("a👧")[:3]) == "a"
    assert detokenizer.flush() == "\N{REPLACEMENT CHARACTER}"


def test_detokenizer_keeps_a_bounded_window() -> None:
    tokenizer = tiny_tokenizer()
    detokenizer = IncrementalDetokenizer(tokenizer)
    half_character = tokenizer.encode("é")[0]
    text = "".join(detokenizer.push((half_character,)) for _ in range(1000)) + detokenizer.flush()
    assert text == tokenizer.decode((half_character,) * 1000)
    assert len(detokenizer._token_ids) < 16


def test_other_threads_run_while_a_long_text_is_encoded(tokenizer: Tokenizer) -> None:
    """A gateway encodes beside its event loop: one long prompt must not hold up all streams."""
    worker = threading.Thread(target=tokenizer.encode, args=("the sea is wide " * 50_000,))
    longest_s = 0.0
    worker.start()
    started_s = last_s = time.perf_counter()
    while worker.is_alive():
        worker.join(0.001)
        now_s = time.perf_counter()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
    assert longest_s < (last_s - started_s) / 2
