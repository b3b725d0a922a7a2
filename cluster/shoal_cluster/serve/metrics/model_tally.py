"""Requests and tokens by what was asked for: the model, or one of its adapters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shoal_cluster.serve.call import Usage
from shoal_cluster.serve.metrics import definitions as d
from shoal_cluster.serve.metrics.tally import Point

MAX_MODELS = 256


class ModelTally:
    """Counts by name, from zero for those that are served from the start. Adapters come and go: beyond ``MAX_MODELS``
    names the one that was not asked for the longest loses its series.

    Args:
        names: the model's, then its adapters'.
    """

    def __init__(self, gateway_id: str, names: Sequence[str]) -> None:
        self._gateway_id = gateway_id
        self._model = names[0]
        self._usages: dict[str, list[int]] = {name: [0, 0, 0, 0] for name in names}  # the latest asked for comes last

    def add(self, name: str, usage: Usage) -> None:
        """Count a request that has ended, as far as it came. "" is the model itself."""
        counts = self._usages.pop(name or self._model, None) or [0, 0, 0, 0]
        used = (1, usage.num_prompt_tokens, usage.num_cached_tokens, usage.num_output_tokens)
        self._usages[name or self._model] = [count + num for count, num in zip(counts, used, strict=True)]
        if len(self._usages) > MAX_MODELS:
            del self._usages[next(iter(self._usages))]

    def counts(self, name: str) -> tuple[int, int, int, int]:
        """Requests, and tokens of prompts, found cached of these, and generated."""
        num_requests, *tokens = self._usages.get(name, (0, 0, 0, 0))
        return (num_requests, *tokens)  # type: ignore[return-value]

    def points(self) -> Iterator[Point]:
        for name, (num_requests, *tokens) in self._usages.items():
            yield Point(d.MODEL_REQUESTS, (self._gateway_id, name), num_requests)
            for kind, num in zip(d.TOKEN_KINDS, tokens, strict=True):
                yield Point(d.MODEL_TOKENS, (self._gateway_id, name, kind), num)
