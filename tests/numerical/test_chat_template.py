"""How the prompts of chats end: as with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fixtures.tiny_tokenizer import BOS, CHAT_TEMPLATE, EOS, raw_tiny_tokenizer, write_tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from shoal_replica.chat_template import PromptEnd
from shoal_replica.tokenizer import Tokenizer

IM_TEMPLATE = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


ASKS = """{% if tools is not none %}tools{% endif %}{% if tools is defined %}!{% endif %}
{%- if documents is not none %}documents{% endif %}{% if documents is defined %}!{% endif %}"""


def test_templates_find_what_transformers_gives_them(tmp_path: Path) -> None:
    ours = Tokenizer.from_folder(write_tiny_tokenizer(tmp_path, chat_template=ASKS))
    theirs = PreTrainedTokenizerFast(tokenizer_object=raw_tiny_tokenizer(), bos_token=BOS, eos_token=EOS)
    turns, tool = [{"role": "user", "content": "Hi"}], {"type": "function", "function": {"name": "x"}}
    for tools in ([], [tool]):
        expected = theirs.apply_chat_template(turns, tools or None, chat_template=ASKS, tokenize=False)
        assert ours.apply_chat_template(turns, tools) == expected


@pytest.mark.parametrize("content", [" Well, I ", "Hi", "a\n", "x", "<", "/s", "end", "", " "])
@pytest.mark.parametrize("filtered", ["", " | trim"])
@pytest.mark.parametrize("template", [CHAT_TEMPLATE, IM_TEMPLATE], ids=["tiny", "im"])
def test_prompts_end_as_with_transformers(tmp_path: Path, template: str, content: str, filtered: str) -> None:
    """Also by a template that strips what it is given, and for a text that comes twice."""
    turns: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
    template = template.replace("message['content']", f"message['content']{filtered}")
    ours = Tokenizer.from_folder(write_tiny_tokenizer(tmp_path, chat_template=template))
    theirs = PreTrainedTokenizerFast(tokenizer_object=raw_tiny_tokenizer(), bos_token=BOS, eos_token=EOS)
    asked: dict[PromptEnd, dict[str, bool]] = {
        PromptEnd.ANSWER: {"add_generation_prompt": True},
        PromptEnd.CLOSED: {},
        PromptEnd.CONTINUED: {"continue_final_message": True},
    }
    for end, options in asked.items():
        expected = theirs.apply_chat_template(turns, chat_template=template, tokenize=False, **options)
        assert ours.apply_chat_template(turns, end=end) == expected
