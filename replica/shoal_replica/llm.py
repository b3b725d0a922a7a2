"""The offline API: prompts in, finished outputs out, without a cluster or an event loop."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from shoal_replica.adapter import VERSION_MARK
from shoal_replica.build import adapter_names, build_executor, build_scheduler, find_adapters, resolve_config
from shoal_replica.chat_template import PromptEnd, Turn
from shoal_replica.config import ParallelConfig, SchedulerConfig
from shoal_replica.errors import ConfigError, InvalidArgument
from shoal_replica.executor import StepTiming, TokenLogprobs, finish
from shoal_replica.grammars import Grammars
from shoal_replica.interrupts import uninterrupted
from shoal_replica.request import FinishReason, Request, TokenDelta
from shoal_replica.request_checks import check_adapter, prepared
from shoal_replica.sampling_defaults import sampling_defaults
from shoal_replica.sampling_params import SamplingParams
from shoal_replica.stats import ReplicaStats
from shoal_replica.text_stream import TextStream
from shoal_replica.tokenizer import Tokenizer

Prompt = str | Sequence[int]


@dataclass(slots=True)
class SequenceOutput:
    """One generated sequence. ``stop_reason`` is the stop string or stop token id that has ended it, if one has."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(slots=True)
class RequestOutput:
    """The result for one prompt. ``token_ids``, ``text`` and ``finish_reason`` are those of the first sequence;
    ``prompt_logprobs``, if asked for, those of the prompt's tokens from the second on.
    """

    prompt_token_ids: tuple[int, ...]
    outputs: list[SequenceOutput]
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[0].finish_reason


class LLM:
    """One replica's engine, used from a plain program.

    Args:
        model: a Hugging Face folder, a hub id, or the demo model's name.
        block_size: tokens per KV block; None means 16 on the CPU and 128 on an NPU.
        num_blocks: size of the KV block pool; None sizes it by ``max_num_seqs`` and the available memory.
        num_host_blocks: more blocks in host memory, which keep cached prefixes evicted from the pool.
        max_num_seqs, max_num_batched_tokens: limits of one step.
        enable_prefix_caching: reuse the KV blocks of prompts that begin alike.
        dtype: "auto" (the checkpoint's; bfloat16 on an NPU), "bfloat16" or "float32".
        quantization: "none", or "int8" or "int4" to round weights when they are loaded; or "w8a8" or "w4a8" to round
            activations to 8 bits as well.
        num_threads: CPU threads per rank. Torch's own are set to as many, or to one where the native kernels serve, in
            the whole process.
        tensor_parallel_size, pipeline_parallel_size: ranks that share each layer, and stages of whole layers; if there
            is more than one rank in all, each runs in a process of its own.
        max_model_len: None takes the model's.
        device: "cpu" or "npu".
        graph_sizes: on an NPU, the batch sizes for which decode-only steps are captured as graphs; None chooses them,
            [] captures none.
        adapters: folders, or hub ids, of LoRA adapters in PEFT's format, by the names under which prompts ask for them.
        num_speculative_tokens: draft tokens that a step may compute for a sequence, where that pays; 0 for none,
            None for 8 on a CPU and 0 on an NPU.

    Raises:
        NotFound, ConfigError: see ``resolve_config`` and ``sampling_defaults``.
    """

    def __init__(
        self,
        model: str,
        *,
        block_size: int | None = None,
        num_blocks: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        dtype: str = "auto",
        quantization: str = "none",
        num_threads: int = 1,
        enable_prefix_caching: bool = True,
        num_host_blocks: int = 0,
        max_model_len: int | None = None,
        device: str = "cpu",
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        graph_sizes: Sequence[int] | None = None,
        adapters: Mapping[str, str] | None = None,
        num_speculative_tokens: int | None = None,
    ) -> None:
        self.config = resolve_config(
            model,
            dtype=dtype,
            quantization=quantization,
            max_model_len=max_model_len,
            block_size=block_size,
            num_blocks=num_blocks,
            enable_prefix_caching=enable_prefix_caching,
            num_host_blocks=num_host_blocks,
            scheduler=SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                num_speculative_tokens=num_speculative_tokens,
            ),
            parallel=ParallelConfig(
                device=device,
                num_threads=num_threads,
                tensor_parallel_size=tensor_parallel_size,
                pipeline_parallel_size=pipeline_parallel_size,
                graph_sizes=None if graph_sizes is None else tuple(graph_sizes),
            ),
            adapters=adapters,
        )
        self.tokenizer = Tokenizer.from_folder(self.config.model.folder)
        self._grammars = Grammars(self.config.model)
        self._default_params = SamplingParams(**sampling_defaults(Path(self.config.model.folder)))
        self._versions = {name: name for name in adapter_names(self.config)}  # of adapters, by the name prompts give
        self._loaded = {*self._versions.values()}
        self._scheduler = build_scheduler(self.config, self._loaded)
        self._executor = build_executor(self.config)
        self._ids = itertools.count()
        self._subscribers: list[Callable[[StepTiming], None]] = []

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        adapter: str | Sequence[str] = "",
    ) -> list[RequestOutput]:
        """Generate for all prompts together; outputs are in the order of the prompts.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            params: one for all, or one per prompt; None for what the model recommends.
            adapter: the name of a LoRA adapter, "" for the model alone; one for all, or one per prompt.

        Raises:
            InvalidArgument: a prompt is empty or too long, an adapter is not loaded, a structure is malformed, or the
                counts differ.
        """
        listed = _as_list(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or self._default_params] * len(listed)
        adapters = [adapter] * len(listed) if isinstance(adapter, str) else [each or "" for each in adapter]
        for what, given in (("params", params), ("adapter", adapters)):
            if len(given) != len(listed):
                raise InvalidArgument(what, len(given), f"must be one, or one for each of {len(listed)} prompts")
        requests = [self._request(*each) for each in zip(listed, params, adapters, strict=True)]
        outputs = {r.request_id: _Collector(r, self.tokenizer) for r in requests}
        pending = list(reversed(requests))
        try:
            while pending or self._scheduler.has_work:
                with uninterrupted():
                    while pending and self._scheduler.has_room:
                        self._scheduler.add(pending.pop())
                    self._step(outputs)
        finally:
            with uninterrupted():
                for request in requests:
                    self._scheduler.abort(request.request_id)
        return [outputs[r.request_id].result for r in requests]

    def chat(
        self,
        messages: Sequence[Turn] | Sequence[Sequence[Turn]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        adapter: str | Sequence[str] = "",
        tools: Sequence[Mapping[str, Any]] = (),
        template_options: Mapping[str, Any] | None = None,
        end: PromptEnd = PromptEnd.ANSWER,
    ) -> list[RequestOutput]:
        """``generate`` for prompts that the model's chat template makes of messages.

        Args:
            messages: one chat, or several: turns with at least ``role`` and ``content``.
            tools: definitions of tools, as OpenAI's API has them, for the template to show.
            template_options: the template's own variables, such as ``enable_thinking``.
            end: how the prompts end.

        Raises:
            InvalidArgument: as by ``generate``; or the model has no chat template, or it refuses the messages.
        """
        one = [turn for turn in messages if isinstance(turn, Mapping)]
        chats = [one] if one else [list(chat) for chat in messages if not isinstance(chat, Mapping)]
        texts = [self.tokenizer.apply_chat_template(chat, tools, template_options, end) for chat in chats]
        return self.generate([self.tokenizer.encode(text, add_special_tokens=False) for text in texts], params, adapter)

    def load_adapter(self, name: str, source: str) -> None:
        """Let prompts ask for one more adapter. It reuses no prefixes computed with another one of the same name.

        Args:
            source: a folder, or a hub id.

        Raises:
            NotFound, ConfigError: there is no such adapter, it is not of this model, or the name is taken.
        """
        if name in self._versions:
            raise ConfigError(f"adapters.{name}: is already loaded")
        (adapter,) = find_adapters({name: source}, self.config.model)
        version = f"{name}{VERSION_MARK}{next(self._ids)}"
        with uninterrupted():
            finish(self._executor.load_adapter(replace(adapter, name=version)))
            self._versions[name] = version
            self._loaded.add(version)

    def unload_adapter(self, name: str) -> None:
        """Free an adapter. Raises InvalidArgument if it is not loaded."""
        if not name:
            raise InvalidArgument("adapter", name, "the model itself cannot be unloaded")
        check_adapter(name, self._versions)
        with uninterrupted():
            version = self._versions.pop(name)
            self._loaded.remove(version)
            self._executor.unload_adapter(version)

    def subscribe(self, subscriber: Callable[[StepTiming], None]) -> Callable[[], None]:
        """Call ``subscriber`` after every step from now on. Returns a function that unsubscribes it."""
        self._subscribers.append(subscriber)
        return lambda: self._subscribers.remove(subscriber)

    def stats(self) -> ReplicaStats:
        """The block ledger and the totals so far."""
        return self._scheduler.stats(time.time())

    def close(self) -> None:
        """Release the model and the block pool."""
        self._executor.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _request(self, prompt: Prompt, params: SamplingParams, adapter: str) -> Request:
        model = self.config.model
        token_ids, params = prepared(prompt, params, self.tokenizer, model.max_model_len, model.vocab_size)
        check_adapter(adapter, self._versions)
        if params.structured_output is not None:
            self._grammars.check(params.structured_output)
        return Request(
            request_id=str(next(self._ids)),
            prompt_token_ids=token_ids,
            sampling_params=params,
            arrival_s=time.monotonic(),
            adapter=self._versions.get(adapter, ""),
        )

    def _step(self, outputs: dict[str, _Collector]) -> None:
        started = time.perf_counter()
        step = self._scheduler.schedule(time.monotonic())
        if step is None:
            raise RuntimeError("the scheduler has work but no step")
        result = self._executor.execute(step)
        for delta in self._scheduler.update(step, result):
            if outputs[delta.request_id].take(delta):
                self._scheduler.abort(delta.request_id, delta.index)
        for subscriber in tuple(self._subscribers):
            subscriber(StepTiming(step, time.perf_counter() - started, result.forward_s))


class _Collector:
    """Gathers the deltas of one request into its output. Detokenizes token by token only if there are stop strings."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        params = request.sampling_params
        self.result = RequestOutput(tuple(request.prompt_token_ids), [SequenceOutput() for _ in range(params.n)])
        self._has_stop = bool(params.stop)
        self._keeps_stop = params.include_stop_str_in_output
        self._texts = [TextStream.of(tokenizer, params, request.prompt_token_ids) for _ in range(params.n)]

    def take(self, delta: TokenDelta) -> bool:
        """Add a delta. True if its text has just completed a stop string, so that the sequence should be aborted."""
        output, text, is_live = self.result.outputs[delta.index], self._texts[delta.index], delta.finish_reason is None
        new_text = ""
        if self._has_stop:
            new_text, delta = text.take(delta)
        output.token_ids.extend(delta.token_ids)
        output.logprobs.extend(delta.logprobs)
        self.result.prompt_logprobs.extend(delta.prompt_logprobs)
        output.finish_reason = delta.finish_reason
        self.result.num_cached_tokens = max(self.result.num_cached_tokens, delta.num_cached_tokens)
        if self._has_stop:
            output.text += new_text
            output.stop_reason = text.stop_reason(delta)
            return text.stopped and is_live
        if delta.finish_reason is not None:
            ended_by_token = len(delta.token_ids) - len(delta.text_token_ids(self._keeps_stop))
            output.text = text.push(output.token_ids[: len(output.token_ids) - ended_by_token])[0] + text.finish()
            output.stop_reason = text.stop_reason(delta)
        return False


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]
