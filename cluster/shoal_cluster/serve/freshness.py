"""Whether what others keep writing to a board is up to date."""

from __future__ import annotations

from collections.abc import Mapping


class Freshness:
    """Judges by the writer's clock or, as hosts' clocks differ, by the reader's: a time that keeps advancing is fresh.
    One that has been found old is so until it advances, also where its writer's clock was ahead of now.

    Args:
        max_age_s: how far from now a written time may be, or how long ago it may last have advanced.
    """

    def __init__(self, max_age_s: float) -> None:
        self._max_age_s = max_age_s
        self._advanced: dict[str, tuple[float, float | None]] = {}  # last time, and when it was seen to advance
        self._old: dict[str, float] = {}  # times that were found old

    def look(self, written_s: Mapping[str, float], unix_s: float, now_s: float) -> frozenset[str]:
        """Which writers are fresh.

        Args:
            written_s: the last Unix time of each writer.
            unix_s: the reader's Unix time.
            now_s: the same moment on the reader's monotonic clock.
        """
        before, self._advanced = self._advanced, {}
        for writer, time_s in written_s.items():
            last_s, advanced_s = before.get(writer, (time_s, None))
            self._advanced[writer] = (time_s, now_s if time_s > last_s else advanced_s)
        fresh = frozenset(
            writer
            for writer, (time_s, advanced_s) in self._advanced.items()
            if (abs(unix_s - time_s) <= self._max_age_s and self._old.get(writer) != time_s)
            or (advanced_s is not None and now_s - advanced_s <= self._max_age_s)
        )
        self._old = {writer: time_s for writer, time_s in written_s.items() if writer not in fresh}
        return fresh
