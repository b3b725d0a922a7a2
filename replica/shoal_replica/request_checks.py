"""What requests ask for, checked where they arrive and where they run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shoal_replica.bad_words import ban_words
from shoal_replica.errors import InvalidArgument, PromptTooLong
from shoal_replica.sampling_params import SamplingParams
from shoal_replica.tokenizer import Tokenizer

MAX_LOGPROBS_TOLD = 100_000  # some 2 MB, in one message from the replica


def prepared(
    prompt: str | Sequence[int],
    params: SamplingParams,
    tokenizer: Tokenizer,
    max_model_len: int,
    vocab_size: int,
    field: str = "prompt",
) -> tuple[tuple[int, ...], SamplingParams]:
    """A prompt's tokens, truncated where ``params`` ask for that, and the parameters as the engine takes them: words in
    tokens, and with a seed. Raises as the checks below do, and InvalidArgument for tokens that the model lacks.
    """
    params = ban_words(params, tokenizer)
    params.check_vocabulary(vocab_size)
    token_ids = tokenizer.encode(prompt) if isinstance(prompt, str) else tuple(prompt)
    token_ids = params.truncate(token_ids, max_model_len)
    check_prompt(token_ids, max_model_len, vocab_size, field)
    check_scores(params, len(token_ids))
    return token_ids, params.seeded()


def check_scores(params: SamplingParams, num_prompt_tokens: int) -> None:
    """Raise InvalidArgument if what is asked for of a prompt is too much to be sent at once."""
    num_entries = 0 if params.prompt_logprobs is None else num_prompt_tokens * (1 + params.prompt_logprobs)
    if num_entries > MAX_LOGPROBS_TOLD:
        limit = f"{num_prompt_tokens} tokens would have {num_entries} of them, and at most {MAX_LOGPROBS_TOLD} are sent"
        raise InvalidArgument("prompt_logprobs", params.prompt_logprobs, limit)


def check_adapter(name: str, loaded: Iterable[str]) -> None:
    """Raise InvalidArgument if ``name`` is neither empty nor one of the ``loaded`` adapters."""
    known = sorted(loaded)
    if name and name not in known:
        raise InvalidArgument(
            "adapter", name, f"must be one of {', '.join(known)}" if known else "no adapter is loaded"
        )


def check_prompt(prompt_token_ids: tuple[int, ...], max_model_len: int, vocab_size: int, field: str = "prompt") -> None:
    """Raise InvalidArgument, naming the ``field`` that the prompt came in, if it is empty or has token ids outside the
    vocabulary, and PromptTooLong if it leaves no room for one more token.
    """
    if not prompt_token_ids:
        raise InvalidArgument(field, "", "must have at least one token")
    if len(prompt_token_ids) >= max_model_len:
        limit = f"must be at most {max_model_len - 1} tokens, which leaves one to generate"
        raise PromptTooLong(field, f"{len(prompt_token_ids)} tokens", limit)
    low, high = min(prompt_token_ids), max(prompt_token_ids)
    if low < 0 or high >= vocab_size:
        raise InvalidArgument(field, low if low < 0 else high, f"token ids must be in [0, {vocab_size})")
