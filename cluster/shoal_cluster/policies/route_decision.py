"""What a placement rule decides: the replicas in order, the reason, and the terms of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Terms = tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class CandidateTerms:
    """One replica's part in a decision. Lower ``score`` is better; it is 0 for a replica that is not eligible.

    ``rejected`` says why it is not eligible. The ``terms`` add up to the score, except those named ``*_blocks`` and
    ``*_slots``, which are what the barrier saw (see ``route``).
    """

    replica_id: str
    eligible: bool
    rejected: str = ""
    score: float = 0.0
    terms: Terms = ()


class RouteDecision:
    """Eligible replicas, best first (none: no replica can take the request), the reason, and every candidate's terms.

    A ``deferred`` decision knows only its ``best``, "" for none, and ``num_ranked``; the rest is computed when it is
    first read.
    """

    __slots__ = ("_parts", "_work_out", "best", "num_ranked")

    def __init__(self, ranked: tuple[str, ...], reason: str, candidates: Sequence[CandidateTerms]) -> None:
        self.best = ranked[0] if ranked else ""
        self.num_ranked = len(ranked)
        self._parts: tuple[tuple[str, ...], str, Sequence[CandidateTerms]] | None = (ranked, reason, candidates)
        self._work_out: Callable[[], RouteDecision] | None = None

    @classmethod
    def deferred(cls, best: str, num_ranked: int, work_out: Callable[[], RouteDecision]) -> RouteDecision:
        """A decision for ``best`` among ``num_ranked``; ``work_out`` computes all of it, and must agree."""
        decision = cls.__new__(cls)
        decision.best, decision.num_ranked = best, num_ranked
        decision._parts, decision._work_out = None, work_out
        return decision

    @property
    def ranked(self) -> tuple[str, ...]:
        return self._whole()[0]

    @property
    def reason(self) -> str:
        return self._whole()[1]

    @property
    def candidates(self) -> Sequence[CandidateTerms]:
        return self._whole()[2]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RouteDecision) and self.best == other.best and self._whole() == other._whole()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"RouteDecision(best={self.best!r}, reason={self.reason!r})"

    def _whole(self) -> tuple[tuple[str, ...], str, Sequence[CandidateTerms]]:
        if self._parts is None:
            assert self._work_out is not None
            whole = self._work_out()
            assert whole.best == self.best, f"{self.best} was chosen, {whole.best} is the best"
            self._parts, self._work_out = whole._whole(), None
        return self._parts
