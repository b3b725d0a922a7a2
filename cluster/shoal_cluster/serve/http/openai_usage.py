"""What an OpenAI answer says of its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal_cluster.serve.call import Chunk, Usage
from shoal_cluster.serve.http.encoding import Json


@dataclass(slots=True)
class UsageSum:
    """Usage summed over all calls of a request. With ``is_all_prompt`` the answers count as empty."""

    is_all_prompt: bool = False
    usages: list[Usage] = field(default_factory=list)
    num_prompt: int = 0  # so far, as is
    num_output: int = 0

    def take(self, chunk: Chunk) -> None:
        """Count a chunk, of whichever call."""
        if chunk.prompt is not None:
            self.num_prompt += len(chunk.prompt.token_ids)
        self.num_output += 0 if self.is_all_prompt else len(chunk.token_ids)
        if chunk.usage is not None:
            self.usages.append(chunk.usage)

    def so_far(self) -> Json:
        """In vLLM's form: as much as is known before the end."""
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_output,
            "total_tokens": self.num_prompt + self.num_output,
        }

    def body(self) -> Json:
        """In OpenAI's form, when all calls have ended."""
        num_prompt = sum(usage.num_prompt_tokens for usage in self.usages)
        num_output = 0 if self.is_all_prompt else sum(usage.num_output_tokens for usage in self.usages)
        num_reasoning = sum(usage.num_reasoning_tokens for usage in self.usages)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "completion_tokens_details": {"reasoning_tokens": num_reasoning},
            "prompt_tokens_details": {"cached_tokens": sum(usage.num_cached_tokens for usage in self.usages)},
        }
