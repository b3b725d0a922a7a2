"""When a sequence ends, and what the model cannot serve."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from shoal_replica.adapter import title
from shoal_replica.errors import InvalidArgument, Unavailable
from shoal_replica.executor import SampledToken
from shoal_replica.request import FinishReason, Request
from shoal_replica.request_checks import check_scores
from shoal_replica.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class FinishRule:
    """Which requests the model can serve, and when a sequence ends: by its own parameters, and by the model's
    end-of-sequence tokens and maximum length.
    """

    eos_token_ids: frozenset[int]
    max_model_len: int
    adapters: Collection[str] = ()

    def check(self, request: Request) -> None:
        """Raise InvalidArgument if the prompt is too long for the model, or its log-probabilities for one message, and
        Unavailable if its adapter is not loaded: while replicas are replaced, another may have it.
        """
        params, num_tokens = request.sampling_params, request.num_prompt_tokens + len(request.output_token_ids)
        if num_tokens >= self.max_model_len:
            raise InvalidArgument("prompt", f"{num_tokens} tokens", f"must be under {self.max_model_len}")
        check_scores(params, request.num_prompt_tokens)
        if request.adapter and request.adapter not in self.adapters:
            raise Unavailable(f"adapter {title(request.adapter)!r} is not loaded here")
        if request.output_token_ids and (params.n > 1 or params.is_beam_search):
            raise ValueError(f"request {request.request_id!r} resumes more than one sequence")

    def num_left(self, request: Request, num_tokens: int) -> int:
        """How many more tokens a sequence of ``num_tokens`` may get."""
        left, max_tokens = self.max_model_len - num_tokens, request.sampling_params.max_tokens
        num_generated = num_tokens - request.num_prompt_tokens
        if request.is_prefill_only:
            left = min(left, len(request.output_token_ids) + 1 - num_generated)
        return left if max_tokens is None else min(left, max_tokens - num_generated)

    def cut(self, request: Request, num_tokens: int, tokens: list[SampledToken]) -> FinishReason | None:
        """Why a sequence of ``num_tokens`` tokens ends that gets ``tokens``, from which those are removed that come
        after its end; None if it goes on.
        """
        for number, token in enumerate(tokens, 1):
            reason = self.reason(request, token.token_id, num_tokens + number, token.is_cut)
            if reason is not None:
                del tokens[number:]
                return reason
        return None

    def num_end_tokens(self, params: SamplingParams) -> int:
        """How many different tokens end a sequence with these parameters."""
        own = frozenset(params.stop_token_ids)
        return len(own if params.ignore_eos else own | self.eos_token_ids)

    def reason(self, request: Request, token_id: int, num_tokens: int, is_cut: bool = False) -> FinishReason | None:
        """Why a sequence ends with ``token_id``, the last of its ``num_tokens`` tokens; None if it goes on. ``is_cut``
        is that of ``SampledToken``.
        """
        params = request.sampling_params
        if is_cut:
            return FinishReason.LENGTH
        if token_id in self.eos_token_ids and not params.ignore_eos:
            return FinishReason.STOP
        if token_id in params.stop_token_ids:
            return FinishReason.STOP
        if params.max_tokens is not None and num_tokens - len(request.prompt_token_ids) >= params.max_tokens:
            return FinishReason.LENGTH
        if num_tokens >= self.max_model_len:
            return FinishReason.LENGTH
        return FinishReason.PREFILLED if request.is_prefill_only else None
