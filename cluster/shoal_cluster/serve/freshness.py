"""Whether what others leave at a board again and again is of now."""

from __future__ import annotations

from collections.abc import Mapping


class Freshness:
    """By each writer's clock, and where that differs by the reader's: what goes on advancing is of now.

    Args:
        max_age_s: how far from now a time may be, and how long ago it may have advanced.
    """

    def __init__(self, max_age_s: float) -> None:
        self._max_age_s = max_age_s
        self._advanced: dict[str, tuple[float, float | None]] = {}  # the last time, and when it was seen to advance

    def look(self, written_s: Mapping[str, float], unix_s: float, now_s: float) -> frozenset[str]:
        """Who of those that have written is fresh.

        Args:
            written_s: Unix times by writer, all that there are.
            unix_s: the reader's Unix time.
            now_s: the same moment on a clock of the reader's that only goes forward.
        """
        before, self._advanced = self._advanced, {}
        for writer, time_s in written_s.items():
            last_s, advanced_s = before.get(writer, (time_s, None))
            self._advanced[writer] = (time_s, now_s if time_s > last_s else advanced_s)
        return frozenset(
            writer
            for writer, (time_s, advanced_s) in self._advanced.items()
            if abs(unix_s - time_s) <= self._max_age_s
            or (advanced_s is not None and now_s - advanced_s <= self._max_age_s)
        )
