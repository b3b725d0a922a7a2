"""One Shoal replica: an engine over a paged KV block pool.

``LLM`` is the offline API; ``AsyncLLM`` streams. Both load torch when first used; the rest of the package does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal_replica.sampling_params import SamplingParams

if TYPE_CHECKING:
    from shoal_replica.async_llm import AsyncLLM
    from shoal_replica.llm import LLM

__all__ = ["LLM", "AsyncLLM", "SamplingParams"]


def __getattr__(name: str) -> object:
    if name == "LLM":
        from shoal_replica.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from shoal_replica.async_llm import AsyncLLM

        return AsyncLLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
