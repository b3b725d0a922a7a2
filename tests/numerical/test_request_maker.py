"""Requests as the gateway makes them of OpenAI's bodies: how prompts end, what is used of them, how answers begin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fixtures.tiny_tokenizer import write_tiny_tokenizer
from fixtures.tool_formats import HERMES_TEMPLATE
from tiny_models import make_checkpoint

from shoal_cluster.serve.call import Prompt
from shoal_cluster.serve.http.openai_chat import ChatRequest
from shoal_cluster.serve.http.openai_types import CompletionRequest, RequestBody
from shoal_cluster.serve.request_maker import Made, RequestMaker
from shoal_replica.chat_template import PromptEnd
from shoal_replica.errors import InvalidArgument
from shoal_replica.grammars import Grammars
from shoal_replica.model_config import ModelConfig
from shoal_replica.tokenizer import Tokenizer

# Without tools, and with a place where a reasoning model would begin.
PLAIN = """{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}{# </think> #}"""
HI = {"role": "user", "content": "hi"}
CONTINUED: dict[str, Any] = {"continue_final_message": True}


class Maker:
    """The real one, over a tiny model."""

    def __init__(self, folder: Path) -> None:
        self.model = ModelConfig.from_folder(folder)
        self.tokenizer = Tokenizer.from_folder(folder)
        grammars = Grammars(self.model)
        grammars.load()
        self.maker = RequestMaker(self.model, self.tokenizer, grammars)

    async def make(self, kind: type[RequestBody], **body: Any) -> Made:
        (call,) = kind.model_validate(body).to_calls("x")
        return await self.maker.make(call, 0.0, self.model.max_model_len)

    async def prompt(self, kind: type[RequestBody], **body: Any) -> str:
        made = await self.make(kind, **body)
        return self.tokenizer.decode(made.request.prompt_token_ids, skip_special_tokens=False)

    async def begins_by_reasoning(self, **body: Any) -> bool:
        made = await self.make(ChatRequest, **body)
        (reader,) = made.readers._readers
        return reader.is_reasoning


@pytest.fixture(scope="module", params=[PLAIN, HERMES_TEMPLATE], ids=["plain", "hermes"])
def template(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def maker(template: str, tmp_path_factory: pytest.TempPathFactory) -> Maker:
    return Maker(write_tiny_tokenizer(make_checkpoint("llama", tmp_path_factory.mktemp("model")), template))


async def test_what_the_model_recommends_stands_in_for_what_is_left_out(maker: Maker) -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    recommending = RequestMaker(maker.model, maker.tokenizer, maker.maker._grammars, defaults)
    (call,) = ChatRequest.model_validate({"messages": [HI], "temperature": 0}).to_calls("x")
    for each, expected in ((recommending, (0.0, 20, 1.1)), (maker.maker, (0.0, 0, 1.0))):
        params = (await each.make(call, 0.0, maker.model.max_model_len)).request.sampling_params
        assert (params.temperature, params.top_k, params.repetition_penalty) == expected


async def test_prompts_end_as_asked(maker: Maker) -> None:
    turns = [HI, {"role": "assistant", "content": "Well, "}]
    for end, asked in (
        (PromptEnd.ANSWER, {}),
        (PromptEnd.CLOSED, {"add_generation_prompt": False}),
        (PromptEnd.CONTINUED, CONTINUED),
    ):
        expected = maker.tokenizer.apply_chat_template(turns, end=end)
        assert await maker.prompt(ChatRequest, messages=turns, **asked) == expected
        (call,) = ChatRequest.model_validate({"messages": turns, **asked}).to_calls("x")
        prompt = Prompt(None, call.messages, call.tools, call.template_options, call.prompt_end)
        token_ids = maker.maker.tokenize(prompt, add_special_tokens=False)
        assert maker.tokenizer.decode(token_ids, skip_special_tokens=False) == expected
    assert expected.endswith("Well, ")


async def test_of_long_prompts_the_end_is_used(maker: Maker) -> None:
    messages = [{"role": "user", "content": "x" * 600}]
    whole = maker.tokenizer.encode(maker.tokenizer.apply_chat_template(messages))
    used = await maker.prompt(ChatRequest, messages=messages, truncate_prompt_tokens=9)
    assert used == maker.tokenizer.decode(whole[-9:], skip_special_tokens=False)
    made = await maker.make(CompletionRequest, prompt="hello " * 200, truncate_prompt_tokens=-1, max_tokens=50)
    assert made.request.num_prompt_tokens == maker.model.max_model_len - 50
    with pytest.raises(InvalidArgument, match="prompt"):
        await maker.make(CompletionRequest, prompt="hello " * 200)


async def test_reasoning_goes_on_where_a_message_ends_within_it(maker: Maker) -> None:
    def turns(content: str, role: str = "assistant") -> list[dict[str, str]]:
        return [HI, {"role": role, "content": content}]

    reasons = maker.begins_by_reasoning
    assert await reasons(messages=turns("<think>\nLet me see"), **CONTINUED)
    assert await reasons(messages=turns("<think>"), **CONTINUED)
    assert not await reasons(messages=turns("<think>\nSo.\n</think>\n\nWell"), **CONTINUED)
    assert await reasons(messages=turns("<think>a</think> b <think> c"), **CONTINUED)
    assert not await reasons(messages=turns("what is <think>", role="user"), **CONTINUED)
    assert not await reasons(messages=turns("what is <think>", role="user"), add_generation_prompt=False)
    assert not await reasons(messages=turns("plain"), **CONTINUED)
