"""The report of a run: min, median and max per row, compared with the floor and the peers; as a table and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table

from shoal_replica.bench.contender import FLOOR, SHOAL, Contender
from shoal_replica.bench.floor import Floor
from shoal_replica.bench.runner import Outcome, Sample
from shoal_replica.bench.workloads import GENERATED, ROWS
from shoal_replica.model_config import ModelConfig

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Line:
    """One contender's samples of one row, in order of rounds.

    ``floors``: for each sample, the floor at that time with the contender's weights (for a peer, with Shoal's); empty
    if the row has no floor. ``ratios``: by name of each other Shoal engine, the median over common rounds of its figure
    divided by this contender's. That engine is faster than this contender if the ratio is below 1 for times, above 1
    for rates.
    """

    row: str
    contender: str
    samples: Sequence[Sample]
    floors: Sequence[float]
    ratios: Mapping[str, float]

    @property
    def values(self) -> list[float]:
        return [sample.value for sample in self.samples]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def floor(self) -> float | None:
        return statistics.median(self.floors) if self.floors else None

    @property
    def ratio_to_floor(self) -> float | None:
        """The median of the samples' ratios, each to its own floor."""
        if not self.floors:
            return None
        return statistics.median(value / floor for value, floor in zip(self.values, self.floors, strict=True))

    @property
    def foreign(self) -> float:
        """The highest foreign share of all repetitions."""
        return max(sample.foreign for sample in self.samples)


def lines(outcome: Outcome, contenders: Sequence[Contender]) -> list[Line]:
    """A line for each row and contender with samples, in order of rows, Shoal first."""
    contenders = [c for c in contenders if c.name != FLOOR]
    models = {c.name: outcome.model(c.name if c.is_shoal else SHOAL) for c in contenders}
    found = []
    for row in ROWS:
        by_name = {c.name: [s for s in outcome.samples if s.row == row and s.contender == c.name] for c in contenders}
        for name, samples in by_name.items():
            if samples:
                ours = {c.name: by_name[c.name] for c in contenders if c.is_shoal and c.name != name}
                ratios = {own: paired_ratio(theirs, samples) for own, theirs in ours.items()}
                known = {own: ratio for own, ratio in ratios.items() if ratio is not None}
                found.append(Line(row, name, samples, _floors(row, samples, models[name]), known))
    return found


def paired_ratio(shoal: Iterable[Sample], other: Iterable[Sample]) -> float | None:
    """The median over common rounds of Shoal's value over the other's: what disturbs a round disturbs both."""
    theirs = {sample.round: sample.value for sample in other}
    ratios = [s.value / theirs[s.round] for s in shoal if theirs.get(s.round)]
    return statistics.median(ratios) if ratios else None


def table(outcome: Outcome, contenders: Sequence[Contender], title: str) -> Table:
    """The table of figures and ratios, for a terminal."""
    ours = [c.name for c in contenders if c.is_shoal]
    found = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for name in ("workload", "engine"):
        found.add_column(name, no_wrap=True)
    for name in ("min", "median", "max", "/ floor", *(f"{own} / it" for own in ours), "foreign"):
        found.add_column(name, justify="right", no_wrap=True)
    last = ""
    for line in lines(outcome, contenders):
        row = ROWS[line.row]
        head = "" if line.row == last else f"{row.title}, {row.unit}"
        if line.row != last:
            found.add_section()
            if line.floor is not None:
                found.add_row(head, FLOOR, "", _number(line.floor))
                head = ""
        last = line.row
        values = (min(line.values), line.median, max(line.values), line.ratio_to_floor)
        found.add_row(
            head,
            line.contender,
            *(_number(value) for value in values),
            *(_number(line.ratios.get(own)) for own in ours),
            f"{line.foreign:.2f}",
        )
    found.add_section()
    head = "s  single steps, ms"
    for shape, seconds in outcome.steps.shapes():
        times = (min(seconds), statistics.median(seconds), max(seconds))
        found.add_row(head, shape, *(_number(1e3 * each) for each in times))
        head = ""
    for shape in outcome.steps.left_out:
        found.add_row(head, f"{shape}: left out, max_num_batched_tokens is too small")
    return found


def as_json(outcome: Outcome, contenders: Sequence[Contender]) -> dict[str, Any]:
    """All measurements, and what is needed to repeat them; ``tests/benchmarks/ENGINE.md`` documents the keys."""
    rows: dict[str, Any] = {}
    for line in lines(outcome, contenders):
        row = rows.setdefault(line.row, asdict(ROWS[line.row]) | {"engines": {}})
        row["engines"][line.contender] = {
            "values": line.values,
            "rounds": [sample.round for sample in line.samples],
            "foreign": [sample.foreign for sample in line.samples],
            "min": min(line.values),
            "median": line.median,
            "max": max(line.values),
            "floor": line.floor,
            "floors": list(line.floors),
            "ratio_to_floor": line.ratio_to_floor,
            "ratios": dict(line.ratios),
        }
    return {
        "format": FORMAT,
        "floor": {
            "best": asdict(Floor.best(outcome.floors)) if outcome.floors else None,
            "samples": [asdict(f) for f in outcome.floors],
        },
        "rows": rows,
        "steps": outcome.steps.as_json(),
        "engines": {
            c.name: {"command": list(c.command), "environment": dict(c.environment), "workloads": c.workloads}
            | {key: outcome.hellos[c.name][key] for key in ("versions", "info")}
            for c in contenders
        },
        "failures": outcome.failures,
    }


def _floors(row: str, samples: Sequence[Sample], model: ModelConfig) -> list[float]:
    """The floor of each sample; empty for mixtures of experts, where the weights that are read depend on the tokens."""
    workload = GENERATED.get(row[0])
    if workload is None or model.moe is not None:
        return []
    return [workload.floors(s.floor, model)[row] for s in samples if s.floor is not None]


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.2f}"
