"""What a run says: rows of min, median and max, beside the floor and the peers; as a table and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table

from shoal_replica.bench.contender import FLOOR, SHOAL, Contender
from shoal_replica.bench.floor import Floor
from shoal_replica.bench.runner import Outcome, Sample
from shoal_replica.bench.workloads import GENERATED, ROWS

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Line:
    """One contender's samples of one row, in the order of rounds.

    ``ratio_to_floor`` is the median over the floor. ``shoal_ratio`` is the median, over the rounds of both, of Shoal's
    figure over this contender's: for times below 1 is faster than the peer, for rates above 1 is.
    """

    row: str
    contender: str
    samples: Sequence[Sample]
    floor: float | None
    shoal_ratio: float | None

    @property
    def values(self) -> list[float]:
        return [sample.value for sample in self.samples]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def ratio_to_floor(self) -> float | None:
        return None if self.floor is None else self.median / self.floor

    @property
    def foreign(self) -> float:
        """The worst repetition's."""
        return max(sample.foreign for sample in self.samples)


def lines(outcome: Outcome, names: Sequence[str]) -> list[Line]:
    """A line for each row and contender that has samples, in the rows' order, Shoal first."""
    floors = _floors(outcome)
    found = []
    for row in ROWS:
        by_name = {name: [s for s in outcome.samples if s.row == row and s.contender == name] for name in names}
        for name, samples in by_name.items():
            if samples:
                ratio = None if name == SHOAL else paired_ratio(by_name[SHOAL], samples)
                found.append(Line(row, name, samples, floors.get(row), ratio))
    return found


def paired_ratio(shoal: Iterable[Sample], other: Iterable[Sample]) -> float | None:
    """The median over common rounds of the one's value over the other's: what disturbs a round disturbs both."""
    theirs = {sample.round: sample.value for sample in other}
    ratios = [s.value / theirs[s.round] for s in shoal if theirs.get(s.round)]
    return statistics.median(ratios) if ratios else None


def table(outcome: Outcome, contenders: Sequence[Contender], title: str) -> Table:
    """The ratio table, for a terminal."""
    found = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for name in ("workload", "unit", "engine"):
        found.add_column(name, no_wrap=True)
    for name in ("min", "median", "max", "of floor", "Shoal / it", "foreign"):
        found.add_column(name, justify="right", no_wrap=True)
    last = ""
    for line in lines(outcome, [c.name for c in contenders if c.name != FLOOR]):
        row = ROWS[line.row]
        if line.row != last:
            found.add_section()
            shown: tuple[str, ...] = (row.title, row.unit)
            if line.floor is not None:
                found.add_row(*shown, FLOOR, "", _number(line.floor), "", "", "", "")
                shown = ("", "")
        else:
            shown = ("", "")
        last = line.row
        values = (min(line.values), line.median, max(line.values))
        found.add_row(
            *shown,
            f"[b]{line.contender}[/b]" if line.contender == SHOAL else line.contender,
            *(_number(value) for value in values),
            *(_number(ratio) for ratio in (line.ratio_to_floor, line.shoal_ratio)),
            f"{line.foreign:.2f}",
        )
    return found


def as_json(outcome: Outcome, contenders: Sequence[Contender]) -> dict[str, Any]:
    """Everything measured, with what is needed to run it again; ``tests/benchmarks/README.md`` says the keys."""
    rows: dict[str, Any] = {}
    for line in lines(outcome, [c.name for c in contenders if c.name != FLOOR]):
        row = rows.setdefault(line.row, asdict(ROWS[line.row]) | {"floor": line.floor, "engines": {}})
        row["engines"][line.contender] = {
            "values": line.values,
            "rounds": [sample.round for sample in line.samples],
            "foreign": [sample.foreign for sample in line.samples],
            "min": min(line.values),
            "median": line.median,
            "max": max(line.values),
            "ratio_to_floor": line.ratio_to_floor,
            "shoal_ratio": line.shoal_ratio,
        }
    return {
        "format": FORMAT,
        "floor": {"best": asdict(Floor.best(outcome.floors)), "samples": [asdict(f) for f in outcome.floors]},
        "rows": rows,
        "steps": outcome.steps.as_json(),
        "engines": {
            c.name: {"command": list(c.command), "environment": dict(c.environment), "workloads": c.workloads}
            | {key: value for key, value in outcome.hellos.get(c.name, {}).items() if key != "ready"}
            for c in contenders
        },
        "failures": outcome.failures,
    }


def _floors(outcome: Outcome) -> dict[str, float]:
    best = Floor.best(outcome.floors)
    return {k: v for workload in GENERATED.values() for k, v in workload.floors(best, outcome.model).items()}


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.2f}"
