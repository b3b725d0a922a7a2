"""The scheduler told as stories: commands in a text file, each followed by what the scheduler did.

A change of behaviour shows as a diff of the stories. To accept it, run ``pytest tests/golden --golden-write`` and read
the diff. The format is that of the data-driven tests of etcd's raft.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from shoal_replica.executor import SchedulerOutput
from shoal_replica.finish_rule import FinishRule
from shoal_replica.request import TokenDelta
from shoal_replica.testing import expected_beams, expected_tokens, make_request, make_scheduler

STORIES = sorted(Path(__file__).parent.glob("*.txt"))
RULE = "----"
MAX_STEPS = 200


@dataclass(slots=True)
class Passage:
    """Lines up to a rule, the last of them a command, and the outcome of that command."""

    lines: list[str]
    outcome: list[str]

    def text(self) -> str:
        return "\n".join([*self.lines, RULE, *self.outcome]) + "\n"


def parse(text: str) -> Iterator[Passage]:
    lines: list[str] = []
    outcome: list[str] | None = None
    for line in [*text.splitlines(), ""]:
        if outcome is not None and line:
            outcome.append(line)
        elif outcome is not None:
            yield Passage(lines, outcome)
            lines, outcome = [], None
        elif line == RULE:
            outcome = []
        elif line or lines:
            lines.append(line)


class Teller:
    """Carries out commands and says what happened."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._prompts: dict[str, tuple[int, ...]] = {}
        self._drawn: dict[tuple[str, int], list[int]] = {}
        self._beams: dict[str, list[list[int]]] = {}

    def tell(self, command: str) -> list[str]:
        verb, *words = command.split()
        plain = [word for word in words if "=" not in word]
        named = dict(word.split("=", 1) for word in words if "=" in word)
        return list(getattr(self, f"_{verb}")(*plain, **named))

    def _scheduler(self, **settings: str) -> Iterator[str]:
        values = {name: value if name == "policy" else int(value) for name, value in settings.items()}
        self._scheduler_, self._executor = make_scheduler(**values)  # type: ignore[arg-type]
        yield self._ledger()

    def _add(self, request_id: str, prompt: str, **numbers: str) -> Iterator[str]:
        """``prompt=0..19`` is 20 tokens; ranges may be joined by commas."""
        token_ids: list[int] = []
        for part in prompt.split(","):
            first, _, last = part.partition("..")
            token_ids += range(int(first), int(last or first) + 1)
        self._prompts[request_id] = tuple(token_ids)
        arrival_s = float(len(self._prompts))
        fields = {name: int(value) for name, value in numbers.items()}
        request = make_request(request_id, token_ids, arrival_s=arrival_s, **fields)
        if request.sampling_params.is_beam_search:
            self._beams[request_id] = expected_beams(request, FinishRule(frozenset(), 10**6))
        self._scheduler_.add(request)
        yield self._ledger()

    def _abort(self, request_id: str, index: str | None = None) -> Iterator[str]:
        yield from self._ends(self._scheduler_.abort(request_id, None if index is None else int(index)))
        yield from self._cache_events()
        yield self._ledger()

    def _step(self, count: str = "1") -> Iterator[str]:
        for _ in range(int(count)):
            output = self._scheduler_.schedule(0.0)
            self._learn_names()
            if output is None:
                yield "nothing to do"
                return
            deltas = self._scheduler_.update(output, self._executor.execute(output))
            self._scheduler_.check_invariants()
            yield f"step {output.step}, tokens: {output.num_tokens}"
            yield from ("  " + line for line in self._planned(output, deltas))
            yield from ("  " + line for line in self._ends(deltas))
            yield from ("  " + line for line in self._cache_events())
            yield "  " + self._ledger()

    def _run(self) -> Iterator[str]:
        """Step until there is nothing left to do, and tell only which sequences ended."""
        for _ in range(MAX_STEPS):
            output = self._scheduler_.schedule(0.0)
            self._learn_names()
            if output is None:
                break
            yield from self._ends(self._scheduler_.update(output, self._executor.execute(output)))
            self._scheduler_.check_invariants()
        yield from self._cache_events()
        yield self._ledger()

    # What happened, in words

    def _learn_names(self) -> None:
        for seq_id, sequence in self._scheduler_._live.by_id.items():
            is_beam = sequence.request.sampling_params.is_beam_search
            place = f"beam{seq_id}" if is_beam else str(sequence.index)
            self._names[seq_id] = f"{sequence.request.request_id}.{place}"

    def _planned(self, output: SchedulerOutput, deltas: list[TokenDelta]) -> Iterator[str]:
        drew = {f"{delta.request_id}.{delta.index}" for delta in deltas if delta.token_ids}
        if output.dropped_seq_ids:
            yield "drop " + " ".join(self._names[seq_id] for seq_id in output.dropped_seq_ids)
        if output.chosen_tokens:
            yield "append to " + " ".join(self._names[seq_id] for seq_id, _ in output.chosen_tokens)
        for source, destination in output.block_copies:
            yield f"copy block {source} to {destination}"
        for new in output.new_sequences:
            computed = f", {new.num_computed_tokens} computed" if new.num_computed_tokens else ""
            blocks = " ".join(map(str, new.block_ids))
            yield f"send {self._names[new.seq_id]}: {len(new.token_ids)} tokens{computed}, blocks {blocks}"
        for seq_id, first, block_ids in output.block_updates:
            yield f"blocks of {self._names[seq_id]} from {first}: {' '.join(map(str, block_ids))}"
        for share in output.scheduled:
            name = self._names[share.seq_id]
            end = share.num_computed_tokens + share.num_new_tokens
            yield f"{name} computes {share.num_computed_tokens}..{end - 1}" + (", draws" if name in drew else "")

    def _ends(self, deltas: list[TokenDelta]) -> Iterator[str]:
        for delta in deltas:
            drawn = self._drawn.setdefault((delta.request_id, delta.index), [])
            drawn.extend(delta.token_ids)
            if delta.request_id in self._beams:
                assert drawn in ([], self._beams[delta.request_id][delta.index])
            else:
                assert drawn == expected_tokens(self._prompts[delta.request_id], len(drawn), delta.index)
            if delta.finish_reason is not None:
                cached = f", {delta.num_cached_tokens} of its prompt cached" if delta.num_cached_tokens else ""
                name = f"{delta.request_id}.{delta.index}"
                yield f"{name} ends ({delta.finish_reason.value}) with {len(drawn)} drawn{cached}"

    def _cache_events(self) -> Iterator[str]:
        stored, removed = self._scheduler_.take_block_events()
        if stored or removed:
            yield f"cache: {len(stored)} stored, {len(removed)} removed"

    def _ledger(self) -> str:
        self._learn_names()
        running = " ".join(self._names[s.seq_id] for s in self._scheduler_._running) or "nobody"
        waiting = " ".join(f"{self._names[s.seq_id]} ({s.status.value})" for s in self._scheduler_._waiting) or "nobody"
        stats = self._scheduler_.stats(0.0)
        blocks = f"{stats.num_allocated_blocks} held, {stats.num_free_blocks} free, {stats.num_cached_blocks} cached"
        return f"running: {running}; waiting: {waiting}; blocks: {blocks}"


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_story(path: Path, request: pytest.FixtureRequest) -> None:
    teller = Teller()
    told = [Passage(passage.lines, teller.tell(passage.lines[-1])) for passage in parse(path.read_text())]
    text = "\n".join(passage.text() for passage in told)
    if request.config.getoption("--golden-write"):
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} is told otherwise now; see the head of {Path(__file__).name}"


def test_there_are_stories() -> None:
    assert len(STORIES) >= 5
