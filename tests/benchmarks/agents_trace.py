"""Makes up a trace of tool-calling agents beside conversations, in Mooncake's format: few prefixes, very hot.

    python tests/benchmarks/agents_trace.py agents.jsonl
    shoal sim --trace agents.jsonl --requests 4000 --find-capacity

Of the requests, 37 % begin with one prompt of 6 144 tokens and answer in a few, 13 % with another of 2 560, 28 % are
new documents or conversations, and 22 % go on with one of the last few hundred. Twenty arrive together every 3.05 s, as
in Mooncake's traces, which tell no times in between.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path
from typing import Any

BLOCK_SIZE = 512
NUM_REQUESTS, PAUSE_MS, BURST = 8000, 3050, 20
AGENT, LOOKUP = list(range(46, 58)), list(range(74, 79))  # blocks of the two hot prompts
GREETING = [0]  # the first block of all others
MAX_PROMPT = 125_000


class Agents:
    """Draws requests. Blocks that are nobody else's have ids from 1000 on."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._next_id = 1000
        self._open: list[tuple[int, list[int]]] = []  # conversations: tokens and blocks of the last prompt

    def arrive(self) -> int:
        """How many requests come next."""
        return max(1, int(self._random.gauss(BURST, 5)))

    def request(self, time_ms: int) -> dict[str, Any]:
        draw, kind = self._random, self._random.random()
        if kind < 0.37:
            num_out = 3 if draw.random() < 0.65 else draw.randint(20, 50)
            return self._after(AGENT, int(draw.expovariate(1 / 500)) + 20, num_out, time_ms)
        if kind < 0.5:
            return self._after(LOOKUP, max(30, int(draw.gauss(580, 80))), draw.randint(16, 24), time_ms)
        if kind < 0.78 or not self._open:
            num_prompt = min(MAX_PROMPT, int(draw.lognormvariate(math.log(7000), 1.1)) + 600)
            made = self._after(GREETING, num_prompt - BLOCK_SIZE, self._answer(), time_ms)
        else:
            last, blocks = self._open.pop(max(0, len(self._open) - 1 - int(draw.expovariate(1 / 250))))
            num_prompt = min(MAX_PROMPT, last + int(draw.expovariate(1 / 900)) + 200)
            whole = blocks[: last // BLOCK_SIZE]
            made = self._after(whole, num_prompt - len(whole) * BLOCK_SIZE, self._answer(), time_ms)
        self._open.append((made["input_length"], made["hash_ids"]))
        return made

    def _answer(self) -> int:
        return int(self._random.lognormvariate(math.log(350), 0.6)) + 1

    def _after(self, blocks: list[int], num_more: int, num_out: int, time_ms: int) -> dict[str, Any]:
        """A request that begins with ``blocks``."""
        num_new = -(-num_more // BLOCK_SIZE)
        own = list(range(self._next_id, self._next_id + num_new))
        self._next_id += num_new
        return {
            "timestamp": time_ms,
            "input_length": len(blocks) * BLOCK_SIZE + num_more,
            "output_length": num_out,
            "hash_ids": blocks + own,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--seed", type=int, default=7)
    given = parser.parse_args()
    agents, rows, time_ms = Agents(given.seed), list[dict[str, Any]](), 0
    while len(rows) < NUM_REQUESTS:
        rows += [agents.request(time_ms) for _ in range(agents.arrive())]
        time_ms += PAUSE_MS
    given.path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
