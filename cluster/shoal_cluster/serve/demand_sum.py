"""What has arrived at all gateways, from what each reports of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shoal_cluster.policies.autoscaling_view import Demand

NOTHING_HELD = {"num_held": 0, "num_held_tokens": 0}


class DemandSum:
    """Sums the gateways' demand such that totals only grow by what arrives, while gateways come, go, pause and return:
    what was counted of one that is silent stays in the sum, and of one that is first heard later only what arrives from
    then on is added. Its earlier total, or all of it at its return, would look like a burst.
    """

    def __init__(self) -> None:
        self._totals: dict[str, Demand] = {}  # as each gateway told last
        self._sum = Demand()  # of totals

    def take(self, told: Mapping[str, Demand]) -> Demand:
        """The sum with what gateways, by id, tell now. Only these hold requests."""
        is_first = not self._totals
        for gateway_id, demand in told.items():
            totals = replace(demand, **NOTHING_HELD)
            before = self._totals.get(gateway_id, Demand() if is_first else totals)
            self._totals[gateway_id] = totals
            self._sum += totals - before
        held = sum(told.values(), Demand())
        return replace(self._sum, num_held=held.num_held, num_held_tokens=held.num_held_tokens)
