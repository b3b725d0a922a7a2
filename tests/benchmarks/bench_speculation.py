"""What speculative decoding gains: decodes of texts that repeat themselves little and much, with it and without.

    python tests/benchmarks/bench_speculation.py smollm2-135m-instruct

Answers of 128 tokens to questions, and to requests to rewrite, to summarise and to comment on parts of this
repository's files. These change: figures are of equal work only where the digest of the prompts, printed first, is the
same. Both engines have one thread and take turns at every group of prompts; times are those of steps that
compute no prompts. Their answers must be the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

from shoal_replica import LLM, SamplingParams
from shoal_replica.executor import StepTiming

ROOT = Path(__file__).parents[2]
QUESTIONS = [
    "Why do fish swim in schools?",
    "How deep is the ocean?",
    "Explain how a bicycle stays upright.",
    "Write a short story about a lighthouse keeper.",
    "List ten uses for a paper clip.",
    "How do vaccines work?",
    "Write a poem about rain.",
    "What should I pack for a hiking trip?",
]
GREEDY = SamplingParams(max_tokens=128, temperature=0.0)
DRAWN = SamplingParams(max_tokens=128, temperature=0.8, top_p=0.95, seed=3)
WARM_UP = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)


def workloads() -> dict[str, list[str]]:
    texts = [path.read_text()[:2500] for path in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "deploy").glob("*.md")))]
    code = [path.read_text()[:2000] for path in sorted((ROOT / "replica" / "shoal_replica").glob("*.py"))[1:9]]
    return {
        "questions": QUESTIONS,
        "rewrite": [f"Rewrite the following text with better grammar:\n\n{text}" for text in texts],
        "summarise": [f"Summarise the following text:\n\n{text}" for text in texts],
        "code": [f"Add type hints and comments to this code:\n```python\n{text}\n```" for text in code],
    }


def digest(prompts: dict[str, list[str]]) -> str:
    return hashlib.blake2b(json.dumps(prompts).encode(), digest_size=8).hexdigest()


class Decodes:
    """Counts an engine's decode steps and their seconds."""

    def __init__(self, llm: LLM) -> None:
        self.seconds, self.num_steps = 0.0, 0
        self.stop = llm.subscribe(self.take)

    def take(self, timing: StepTiming) -> None:
        if all(share.num_new_tokens == 1 + len(share.drafts) for share in timing.output.scheduled):
            self.seconds += timing.seconds
            self.num_steps += 1


def measure(llms: list[LLM], prompts: list[str], params: SamplingParams, size: int) -> None:
    counts, tokens = [Decodes(llm) for llm in llms], list[list[list[int]]]()
    for start in range(0, len(prompts), size):
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts[start : start + size]]
        answers = [[output.token_ids for output in llm.chat(chats, params)] for llm in llms]
        assert answers[0] == answers[1], "the answers differ"
        tokens.append(answers[0])
    num_tokens = sum(len(answer) - 1 for group in tokens for answer in group)
    for count in counts:
        count.stop()
    plain, guessing = counts
    print(
        f"{num_tokens:6} {plain.num_steps:6} {guessing.num_steps:6} {num_tokens / plain.seconds:8.1f} "
        f"{num_tokens / guessing.seconds:8.1f} {plain.seconds / guessing.seconds:6.2f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--quantization", default="none")
    args = parser.parse_args()
    prompts_of = workloads()
    print(f"prompts: {digest(prompts_of)}")
    llms = [
        LLM(args.model, num_blocks=2048, quantization=args.quantization, num_speculative_tokens=number)
        for number in (0, None)
    ]
    for llm in llms:
        llm.generate([list(range(1000, 1600))], WARM_UP)
    print(f"{'':28} tokens  steps, with guesses  tokens/s, with guesses  gain")
    for size in args.sequences:
        for name, prompts in prompts_of.items():
            for how, params in (("greedy", GREEDY), ("drawn", DRAWN)):
                print(f"{size:3} x {name:12} {how:8}", end=" ")
                measure(llms, prompts, params, size)


if __name__ == "__main__":
    main()
