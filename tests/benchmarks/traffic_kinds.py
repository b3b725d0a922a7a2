"""Kinds of traffic, drawn at random: who shares which prefixes, how long prompts and answers are, when they come."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence

from shoal_cluster.sim.workload import SimRequest

Runs = tuple[tuple[int, int], ...]
"""A prefix, as (token id, count)."""

MAX_TOKENS = 100_000  # a conversation ends that has more
TOKEN_IDS = 2**24  # for each of a case's parts


class Traffic:
    """Makes ``count`` requests at a mean ``rate`` (requests/s). ``place`` keeps the parts of one case apart."""

    def __init__(self, seed: int, place: int, rate: float, count: int) -> None:
        self.draw = random.Random(seed)
        self.rate, self.count = rate, count
        self._place, self._next_id = place, place * TOKEN_IDS
        self.requests: list[SimRequest] = []

    def prefix(self, num_tokens: int) -> Runs:
        """A new one."""
        self._next_id += 1
        return ((self._next_id, num_tokens),) if num_tokens else ()

    def about(self, mean: float, most: int = 20_000) -> int:
        """An exponential draw."""
        return int(min(most, max(1, self.draw.expovariate(1 / mean))))

    def around(self, median: float, sigma: float, most: int = MAX_TOKENS) -> int:
        """A lognormal draw."""
        return int(min(most, max(1, self.draw.lognormvariate(math.log(median), sigma))))

    def one_of(self, count: int) -> int:
        """Some number below ``count``, in inverse proportion to its rank."""
        return self.draw.choices(range(count), [1 / (rank + 1) for rank in range(count)])[0]

    def ask(self, arrival_s: float, prefix: Runs, num_new_tokens: int, num_output_tokens: int) -> None:
        name = f"{self._place}-{len(self.requests)}"
        self.requests.append(SimRequest(name, arrival_s, prefix + self.prefix(num_new_tokens), num_output_tokens))

    def arrivals(self) -> Iterator[float]:
        """Poisson, with bursts, in crowds or at the ticks of a clock."""
        pattern, time_s = self.draw.choice(["poisson", "poisson", "bursts", "crowds", "ticks"]), 0.0
        shape = self.draw.choice([0.06, 0.11, 0.25])  # coefficients of variation of 4, 3, 2
        crowd, tick_s = self.draw.choice([20, 50, 100]), self.draw.choice([1, 3, 10])
        while True:
            if pattern == "poisson":
                time_s += self.draw.expovariate(self.rate)
                yield time_s
            elif pattern == "bursts":
                time_s += self.draw.gammavariate(shape, 1 / (self.rate * shape))
                yield time_s
            else:
                size = crowd if pattern == "crowds" else max(1, round(self.rate * tick_s))
                yield from sorted(time_s + self.draw.random() for _ in range(size))
                time_s += size / self.rate


def chats(made: Traffic) -> None:
    """Conversations with pauses; some begin with one of a few system prompts."""
    draw = made.draw
    turns, think_s, gap_s = draw.choice([3, 6, 12]), draw.choice([2, 8, 30, 90]), draw.choice([1, 4, 10])
    systems = [made.prefix(draw.choice([0, 500, 2000, 6000])) for _ in range(draw.choice([1, 4, 20]))]
    asked, answered = draw.choice([40, 200, 800, 2500]), draw.choice([30, 150, 400, 800])
    _threads(
        made,
        mean_length=turns,
        begin=lambda: systems[made.one_of(len(systems))],
        size=lambda: (made.around(asked, 0.8), made.around(answered, 0.7, 3000)),
        pause=lambda: gap_s + draw.expovariate(1 / think_s),
    )


def agents(made: Traffic) -> None:
    """Loops of calls, each with all that came before, that begin with one of a few long prompts."""
    draw = made.draw
    calls, tool_s, gap_s = draw.choice([5, 12, 25]), draw.choice([0.5, 3, 15]), draw.choice([0.5, 2, 6])
    systems = [made.prefix(draw.choice([1000, 3000, 8000])) for _ in range(draw.choice([1, 3, 10]))]
    added, answered = draw.choice([300, 1000, 2500]), draw.choice([20, 80, 300])
    _threads(
        made,
        mean_length=calls,
        begin=lambda: draw.choice(systems),
        size=lambda: (made.about(added), made.about(answered, 2000)),
        pause=lambda: gap_s + draw.expovariate(1 / tool_s),
    )


def _threads(
    made: Traffic,
    mean_length: int,
    begin: Callable[[], Runs],
    size: Callable[[], tuple[int, int]],
    pause: Callable[[], float],
) -> None:
    """Threads of requests, each with all that came before in its own; some have begun before the first second."""
    start_s, horizon_s = -mean_length * pause(), made.count / made.rate
    while start_s < horizon_s:
        start_s += made.draw.expovariate(made.rate / mean_length)
        said, time_s = begin(), start_s
        for _ in range(made.about(mean_length, 60)):
            asked, answered = size()
            if time_s >= 0:
                made.ask(time_s, said, asked, answered)
            said += made.prefix(asked + answered)
            if sum(count for _, count in said) > MAX_TOKENS:
                break
            time_s += pause()


def documents(made: Traffic) -> None:
    """Questions about one or a few of many documents."""
    draw = made.draw
    known = [made.prefix(made.about(draw.choice([1000, 3000, 8000]))) for _ in range(draw.choice([3, 10, 50, 300]))]
    per_question, asked, answered = draw.choice([1, 1, 2, 4]), draw.choice([50, 200, 600]), _answers(made)
    system = made.prefix(draw.choice([0, 500, 1000]))
    for time_s in made.arrivals():
        if len(made.requests) == made.count:
            return
        found = sum((known[made.one_of(len(known))] for _ in range(per_question)), start=system)
        made.ask(time_s, found, made.about(asked), made.about(answered, 2000))


def batches(made: Traffic) -> None:
    """Evaluations: all questions of a set begin with the same long examples."""
    draw = made.draw
    examples = [made.prefix(draw.choice([2000, 8000, 25_000])) for _ in range(draw.choice([1, 1, 2, 5]))]
    is_sequential, asked, answered = draw.random() < 0.5, draw.choice([50, 200, 1000]), _answers(made)
    for number, time_s in enumerate(made.arrivals()):
        if number == made.count:
            return
        chosen = examples[number * len(examples) // made.count] if is_sequential else draw.choice(examples)
        made.ask(time_s, chosen, made.about(asked), made.about(answered, 2000))


def strangers(made: Traffic) -> None:
    """Prompts that share nothing, short ones and long ones."""
    draw = made.draw
    share, short, long = draw.choice([0, 0.05, 0.2, 0.5]), draw.choice([30, 200, 800]), draw.choice([4000, 12_000])
    sigma, answered = draw.choice([0.1, 0.5, 1.0]), _answers(made)
    for time_s in made.arrivals():
        if len(made.requests) == made.count:
            return
        made.ask(time_s, (), made.around(long if draw.random() < share else short, sigma), made.around(answered, 0.7))


def moving(made: Traffic) -> None:
    """Most begin with one prompt, which changes now and then."""
    draw = made.draw
    period_s, size = draw.choice([10, 30, 60]), draw.choice([1000, 4000, 12_000])
    share, asked, answered = draw.choice([0.5, 0.8, 1.0]), draw.choice([50, 300, 1500]), _answers(made)
    hot, number = made.prefix(size), 0
    for time_s in made.arrivals():
        if len(made.requests) == made.count:
            return
        if time_s // period_s > number:
            hot, number = made.prefix(size), int(time_s // period_s)
        made.ask(time_s, hot if draw.random() < share else (), made.about(asked), made.about(answered, 2000))


def trees(made: Traffic) -> None:
    """Prefixes in three levels: an organisation's, an application's in it, a user's in that."""
    draw = made.draw
    widths, sizes = (
        [draw.choice([1, 3, 8]), 6, draw.choice([5, 30])],
        [draw.choice([300, 1500, 4000]) for _ in range(3)],
    )
    asked, answered = draw.choice([50, 300, 1500]), _answers(made)
    nodes: dict[tuple[int, ...], Runs] = {}
    for time_s in made.arrivals():
        if len(made.requests) == made.count:
            return
        path: tuple[int, ...] = ()
        prefix: Runs = ()
        for level in range(draw.choice([1, 2, 3, 3])):
            path += (made.one_of(widths[level]),)
            if path not in nodes:
                nodes[path] = made.prefix(sizes[level])
            prefix += nodes[path]
        made.ask(time_s, prefix, made.about(asked), made.about(answered, 2000))


def _answers(made: Traffic) -> int:
    return made.draw.choice([1, 5, 20, 100, 300, 800])


KINDS: dict[str, Callable[[Traffic], None]] = {
    kind.__name__: kind for kind in (chats, agents, documents, batches, strangers, moving, trees)
}


def mixed(seed: int, kinds: Sequence[str], rate: float, count: int) -> list[SimRequest]:
    """Equal parts of some kinds, in order of arrival."""
    requests: list[SimRequest] = []
    for place, kind in enumerate(kinds):
        part = Traffic(1000 * seed + place, place, rate / len(kinds), count // len(kinds))
        KINDS[kind](part)
        requests += sorted(part.requests, key=lambda request: request.arrival_s)[: part.count]
    requests.sort(key=lambda request: request.arrival_s)
    return requests
