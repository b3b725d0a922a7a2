"""The screen of ``shoal top``. A pure function: an update in, a renderable out."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal_cluster.policies.ranking import MAX_AGE_S
from shoal_cluster.serve.dashboard.history import Sample
from shoal_cluster.serve.dashboard.update import Blocks, Replica, Update
from shoal_cluster.serve.explanation import clock
from shoal_cluster.serve.replica_state import State

STATE_STYLES = {"ready": "green", "starting": "cyan", "draining": "yellow", "silent": "dim"}
STATE_STYLES |= dict.fromkeys(("stalled", "not connected"), "red")
EVENT_STYLES = {"ready": "green", "draining": "yellow", "refused": "yellow"}
EVENT_STYLES |= dict.fromkeys(("lost", "died", "failed"), "red")
POOL_STYLES = (("running", "cyan"), ("reserved", "yellow"), ("cached", "blue"), ("empty", "bright_black"))
SPARKS = " ▁▂▃▄▅▆▇█"
NONE = "–"
FIXED_LINES = 23  # lines of a screen without replicas and events; what does not fit is cropped at the bottom
NARROW = 120  # on terminals with fewer columns, less is shown
COLUMNS = ("used", "run", "wait", "due", "tok/s", "step", "hits", "routed", "age")
ONLY_WIDE = frozenset({"due", "hits", "routed"})


@dataclass(frozen=True, slots=True)
class Past:
    """The samples of the last minutes, oldest first."""

    samples: deque[Sample]

    def add(self, sample: Sample | None) -> None:
        if sample is not None and (not self.samples or sample.time_s > self.samples[-1].time_s):
            self.samples.append(sample)

    def line(self, name: str, width: int, top: float | None = None) -> str:
        """The last ``width`` samples of a field as a sparkline, scaled to ``top`` or else to the highest of them."""
        values = [getattr(sample, name) for sample in list(self.samples)[-width:]]
        highest = top or max((value for value in values if value is not None), default=0.0) or 1.0
        return "".join(
            " " if value is None else SPARKS[1 + round(min(1.0, value / highest) * (len(SPARKS) - 2))]
            for value in values
        )


def screen(update: Update, past: Past, trouble: str, width: int, height: int | None) -> RenderableType:
    """Everything that the dashboard page shows except full records. ``height`` None shows all lines."""
    fixed = FIXED_LINES + len(update.events) + (3 if width < NARROW else 0)
    num_rows = len(update.replicas) if height is None else max(3, height - fixed)
    parts: list[RenderableType] = [
        _head(update, trouble),
        *_strip(update, width),
        _pool(update.blocks, width),
        Text(),
        _replicas(update, num_rows, width),
        _lines(update, past, width),
        Text(),
        *_scaling(update),
        Text(),
        *_routes(update),
        Text(),
        *_events(update),
    ]
    return Group(*parts)


def _head(update: Update, trouble: str) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append("Shoal ", "bold cyan")
    text.append(f"{update.model} · {update.devices}  ", "dim")
    text.append(f"{clock(update.time_s)}  ")
    text.append(f"● {trouble}" if trouble else "● live", "red" if trouble else "green")
    return text


def _strip(update: Update, width: int) -> list[Table]:
    latency = update.latency
    attained = latency.attainment if latency is not None else None
    ttft = latency.ttft_s if latency is not None else None
    inter_token = latency.inter_token_s if latency is not None else None
    tone = "green" if attained is None or attained >= 0.99 else "yellow" if attained >= 0.9 else "red"
    cells = {
        "requests/s": (_rate(update.requests_per_s), f"{update.num_active} active"),
        "tokens/s": (_rate(update.tokens_per_s), f"{update.num_running} running"),
        "hit rate": (_share(update.hit_rate), "of prompts"),
        "queue": (str(update.num_waiting), f"{update.waiting_tokens:,} tokens"),
        "TTFT p50": (_seconds(ttft and ttft[0]), _tails(ttft)),
        "inter-token p50": (_seconds(inter_token and inter_token[0]), _tails(inter_token)),
        "within objective": (_share(attained, 1), f"{update.num_shed} shed, {update.num_failed} failed"),
    }
    tables = []
    names = list(cells)
    for row in (names,) if width >= NARROW else (names[:4], names[4:]):
        table = Table(box=None, expand=True, padding=(0, 1, 0, 0), header_style="dim")
        for name in row:
            table.add_column(name, no_wrap=True, ratio=3 if name.endswith("p50") else 2)
        table.add_row(*(Text(cells[name][0], f"bold {tone}" if name == "within objective" else "bold") for name in row))
        table.add_row(*(Text(cells[name][1], "dim") for name in row))
        tables.append(table)
    return tables


def _pool(blocks: Blocks, width: int) -> Text:
    parts = _parts((blocks.allocated, blocks.cached, blocks.reserved, blocks.free, blocks.total))
    text = Text(no_wrap=True)
    text.append_text(_bar(parts, blocks.total, max(10, width - 1)))
    text.append("\n")
    for (name, style), part in zip(POOL_STYLES, parts, strict=True):
        text.append("■ ", style)
        text.append(f"{name} {part:,}   ")
    text.append(f"of {blocks.total:,} blocks", "dim")
    return text


def _replicas(update: Update, num_rows: int, width: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, expand=True, padding=(0, 1, 0, 0), header_style="dim", show_edge=False)
    for name in ("replica", "state"):
        table.add_column(name, no_wrap=True)
    names = [name for name in COLUMNS if width >= NARROW or name not in ONLY_WIDE]
    bar_width = max(8, width - (92 if width >= NARROW else 66))
    table.add_column("blocks", no_wrap=True, min_width=bar_width)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for replica in update.replicas[:num_rows]:
        table.add_row(*_replica(replica, bar_width, names))
    left_out = update.num_replicas_left_out + max(0, len(update.replicas) - num_rows)
    if left_out:
        table.add_row(f"and {left_out} more")
    return table


def _replica(replica: Replica, bar_width: int, names: list[str]) -> list[Text]:
    told = replica.role if replica.role and replica.state == State.READY else replica.state
    name, state = Text(replica.replica_id, "bold"), Text(told, STATE_STYLES.get(replica.state, ""))
    if replica.age_s is None:
        return [name, state]
    allocated, _, _, _, total = replica.blocks
    cells = {
        "used": Text(_share(allocated / total if total else 0.0)),
        "run": Text(f"{replica.num_running}/{replica.max_num_seqs}"),
        "wait": Text(str(replica.num_waiting)),
        "due": Text(f"{replica.waiting_tokens:,}"),
        "tok/s": Text(_rate(replica.tokens_per_s)),
        "step": Text(_seconds(replica.step_ms / 1000)),
        "hits": Text(_share(replica.hit_rate)),
        "routed": Text(_share(replica.routed)),
        "age": Text(f"{replica.age_s:.1f} s", "yellow" if replica.age_s > MAX_AGE_S else "dim"),
    }
    return [name, state, _bar(_parts(replica.blocks), total, bar_width), *(cells[name] for name in names)]


def _lines(update: Update, past: Past, width: int) -> Table:
    half = max(10, (width - 40) // 2)
    table = Table(box=None, padding=(0, 1, 0, 0), show_header=False)
    rows = (
        (("blocks in use", "utilization", 1.0, "cyan"), ("tokens/s", "tokens_per_s", None, "cyan")),
        (("tokens waiting", "waiting_tokens", None, "yellow"), ("TTFT p95", "ttft_p95_s", None, "yellow")),
        (("replicas", "num_ready", None, "green"), ("within objective", "attainment", 1.0, "green")),
    )
    for pair in rows:
        cells: list[Text] = []
        for name, key, highest, style in pair:
            cells += [Text(f"{name:>14}", "dim"), Text(f"{past.line(key, half, highest):>{half}}", style)]
        table.add_row(*cells)
    return table


def _scaling(update: Update) -> list[Text]:
    scaling = update.scaling
    wanted = NONE if scaling.num_wanted is None else str(scaling.num_wanted)
    low, high = (scaling.settings.get(name, 0) for name in ("min_replicas", "max_replicas"))
    head = _line("scaling", f"{wanted} wanted of {low:g} to {high:g}", scaling.reason or "the autoscaler is silent")
    marks = (
        _line(clock(mark.time_s), f"{mark.num_before} → {mark.num_after}", mark.reason) for mark in scaling.marks[::-1]
    )
    return [head, *marks]


def _routes(update: Update) -> list[Text]:
    return [_line(clock(route.time_s), route.request_id, f"{route.reason}") for route in update.routes[:4]] or [
        Text("no request has been routed yet", "dim")
    ]


def _events(update: Update) -> list[Text]:
    lines = []
    for event in update.events[::-1]:
        kind = event.kind if event.count == 1 else f"{event.kind} × {event.count}"
        whom = " ".join(filter(None, (event.replica_id, event.request_id)))
        lines.append(_line(clock(event.time_s), kind, f"{whom} {event.text}".strip(), EVENT_STYLES.get(event.kind, "")))
    return lines


def _line(when: str, what: str, why: str, style: str = "bold") -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"{when:<9}", "dim")
    text.append(f"{what:<16} ", style)
    text.append(why)
    return text


def _parts(blocks: tuple[int, int, int, int, int]) -> tuple[int, int, int, int]:
    """Split into running, reserved, cached and empty; reservations take empty blocks first, as on the dashboard."""
    allocated, cached, reserved, free, _ = blocks
    promised = min(reserved, free)
    empty = max(0, free - cached - promised)
    return allocated, promised, max(0, free - promised - empty), empty


def _bar(parts: tuple[int, int, int, int], total: int, width: int) -> Text:
    text, done, drawn = Text(no_wrap=True), 0, 0
    for (_, style), part in zip(POOL_STYLES, parts, strict=True):
        done += part
        end = round(width * done / total) if total else 0
        text.append("━" * (end - drawn), style)
        drawn = end
    return text


def _tails(times: tuple[float, float, float] | None) -> str:
    return f"p95 {_seconds(times and times[1])} p99 {_seconds(times and times[2])}"


def _rate(value: float | None) -> str:
    return NONE if value is None else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _share(value: float | None, digits: int = 0) -> str:
    return NONE if value is None else f"{value:.{digits}%}"


def _seconds(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value * 1000:.3g} ms" if value < 0.9995 else f"{value:.3g} s"
