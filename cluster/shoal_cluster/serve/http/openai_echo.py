"""A completion's prompt, told before its answer: OpenAI's `echo`."""

from __future__ import annotations

from dataclasses import dataclass

from shoal_cluster.serve.call import GenerateCall, Prompt
from shoal_cluster.serve.gateway_core import GatewayCore
from shoal_cluster.serve.long_texts import in_turn


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt of one call.

    Attributes:
        token_ids: its tokens, if log-probabilities are asked for; else none.
        is_all: whether nothing is wanted but the prompt.
    """

    text: str
    token_ids: tuple[int, ...]
    is_all: bool

    @classmethod
    async def of(cls, core: GatewayCore, call: GenerateCall, is_all: bool) -> Echo:
        """Of a call that has been accepted: its tokens exist."""
        text, whole, params = call.text, call.token_ids or (), call.sampling_params
        may_be_cut, is_scored = params.truncate_prompt_tokens is not None, params.prompt_logprobs is not None
        if text is not None and (may_be_cut or is_scored):
            whole = await in_turn(core.tokenize, Prompt(text), add_special_tokens=True)
        token_ids = params.truncate(whole, core.model_card().max_model_len)
        if text is None or len(token_ids) < len(whole):
            text = await in_turn(core.detokenize, token_ids)
        return cls(text, token_ids if is_scored else (), is_all)
