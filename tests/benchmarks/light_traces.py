"""Makes up traces with prefixes that are shared by more requests than one replica can take, though most stand idle.

    python tests/benchmarks/light_traces.py hot --seed 0 > hot.jsonl
    shoal sim --trace hot.jsonl --speed 40 --gateways 4      (agents at 1, herd at 0.1 with one gateway; streams at 20)

* hot: one prompt of 8 192 tokens and some 500 more, an answer of 100 on average; one request a second.
* agents: loops of 8 to 21 calls, each with all that came before, every 8 s on average; they begin with one of four
  prompts of 6 144 tokens. Five calls a second, which is a third of what 8 replicas carry.
* herd: 60 requests at once with a new prompt of 12 288 tokens, beside others without prefixes; 30 and 60 in a minute
  and a half.
* streams: short prompts without prefixes, answers of 500 to 1 500 tokens; one request a second. At 20 times its speed
  every replica decodes, and can take more.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

BLOCK_SIZE = 512

Row = dict[str, Any]


class Maker:
    """Draws requests in Mooncake's format. Every block has an id of its own."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._next_id = 0

    def blocks(self, count: int) -> list[int]:
        self._next_id += count
        return list(range(self._next_id - count, self._next_id))

    def about(self, mean: float, least: int = 1, most: int = 10**9) -> int:
        """An exponential draw within limits."""
        return int(min(most, max(least, self.random.expovariate(1 / mean))))

    def row(self, time_s: float, prefix: Sequence[int], num_more: int, num_output: int) -> Row:
        """A request that begins with the blocks of ``prefix`` and has ``num_more`` tokens of its own."""
        num_tokens = len(prefix) * BLOCK_SIZE + max(1, num_more)
        own = self.blocks(-(-num_tokens // BLOCK_SIZE) - len(prefix))
        times = {"timestamp": int(time_s * 1000), "input_length": num_tokens, "output_length": max(1, num_output)}
        return times | {"hash_ids": [*prefix, *own]}


def hot(make: Maker) -> Iterator[Row]:
    prefix, time_s = make.blocks(16), 0.0
    while True:
        time_s += make.random.expovariate(1.0)
        yield make.row(time_s, prefix, make.about(500, 10), make.about(100))


def streams(make: Maker) -> Iterator[Row]:
    time_s = 0.0
    while True:
        time_s += make.random.expovariate(1.0)
        yield make.row(time_s, (), make.random.randint(50, 300), make.random.randint(500, 1500))


def agents(make: Maker, rate: float = 5.0, num_requests: int = 2000) -> Iterator[Row]:
    prompts, calls, mean_calls = [make.blocks(12) for _ in range(4)], [], 15
    start_s = -8.0 * mean_calls  # so that they are under way at 0
    while start_s < num_requests / rate:
        start_s += make.random.expovariate(rate / mean_calls)
        said, time_s = list(make.random.choice(prompts)), start_s
        for _ in range(make.random.randint(8, 21)):
            calls.append((time_s, list(said)))
            said += make.blocks(make.random.randint(1, 4))
            time_s += 5.0 + make.random.expovariate(1 / 3.0)
    for time_s, said in sorted(calls, key=lambda call: call[0]):
        if time_s >= 0:
            yield make.row(time_s, said, make.random.randint(20, 400), make.about(100))


def herd(make: Maker) -> Iterator[Row]:
    for start_s in range(0, 10**9, 90):
        prefix = make.blocks(24)
        rows = [
            make.row(start_s + 0.2 * make.random.random(), prefix, make.about(200, 10), make.about(100))
            for _ in range(60)
        ]
        rows += [
            make.row(start_s + 90 * make.random.random(), (), make.about(1500, 20, 10_000), make.about(150))
            for _ in range(30)
        ]
        yield from sorted(rows, key=lambda row: row["timestamp"])


FAMILIES: dict[str, tuple[Callable[[Maker], Iterator[Row]], int]] = {
    "hot": (hot, 4000),
    "agents": (agents, 2000),
    "herd": (herd, 900),
    "streams": (streams, 1000),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    family, num_requests = FAMILIES[arguments.family]
    for _, row in zip(range(num_requests), family(Maker(arguments.seed)), strict=False):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
