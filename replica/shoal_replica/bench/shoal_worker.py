"""Shoal's engine in a worker process: ``LLM`` as users call it, plus the timing of its steps.

``"steps": true`` in a request adds the timing of each step to the answer. ``{"op": "kv_bytes"}`` asks for the bytes of
the KV blocks that have been allocated at least once; the others were never written, so they take no memory.
"""

from __future__ import annotations

import inspect
import json
import sys
from dataclasses import asdict
from importlib import metadata
from typing import Any

from shoal_replica import LLM, SamplingParams
from shoal_replica.bench.worker import Engine, Settings, serve
from shoal_replica.build import plan_replica
from shoal_replica.errors import ConfigError
from shoal_replica.executor import StepTiming

NUM_BLOCKS = 2400  # of 16 tokens: every workload fits without preemption


class Shoal(Engine):
    """``options`` are arguments of ``LLM``. Nothing is guessed unless they ask for it: random prompts say nothing about
    guesses, and steps are to be alike.
    """

    def __init__(self, settings: Settings) -> None:
        known = inspect.signature(LLM).parameters
        if unknown := settings.options.keys() - known.keys():
            raise ConfigError(f"engine option {min(unknown)!r} is not one of {', '.join(list(known)[1:])}")
        own = {"num_blocks": NUM_BLOCKS, "num_threads": settings.num_threads, "num_speculative_tokens": 0}
        options = own | settings.options
        self._llm = LLM(settings.model, **options)
        config = self._llm.config
        self._block_bytes = config.model.block_bytes(config.cache.block_size)
        self._used_blocks: set[int] = set()
        self._llm.subscribe(self._note_blocks)
        self.versions = {name: metadata.version(name) for name in ("torch", "numpy")}
        self.info = {
            "model": asdict(config.model),
            "weight_bytes": config.model.weight_bytes,
            "cache": asdict(config.cache),
            "scheduler": asdict(config.scheduler),
            "kernels": plan_replica(config).kernels,
        }

    def generate(self, prompts: list[list[int]], max_tokens: int, **how: Any) -> list[list[int]]:
        params = SamplingParams(**{"temperature": 0.0} | how, max_tokens=max_tokens, ignore_eos=True)
        return [output.token_ids for output in self._llm.generate(prompts, params)]

    def _note_blocks(self, timing: StepTiming) -> None:
        for sequence in timing.output.new_sequences:
            self._used_blocks.update(sequence.block_ids)
        for _, _, block_ids in timing.output.block_updates:
            self._used_blocks.update(block_ids)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["op"] == "kv_bytes":
            return {"kv_bytes": len(self._used_blocks) * self._block_bytes}
        if not request.get("steps"):
            return super().answer(request)
        timings: list[StepTiming] = []
        stop = self._llm.subscribe(timings.append)
        try:
            return super().answer(request) | {"steps": [_step(timing) for timing in timings]}
        finally:
            stop()


def _step(timing: StepTiming) -> dict[str, Any]:
    scheduled = timing.output.scheduled
    return {
        "num_seqs": len(scheduled),
        "num_new_tokens": sum(s.num_new_tokens for s in scheduled),
        "num_computed_tokens": sum(s.num_computed_tokens for s in scheduled),
        "seconds": timing.seconds,
        "forward_s": timing.forward_s,
    }


if __name__ == "__main__":
    serve(Shoal, Settings(**json.loads(sys.argv[1])))
