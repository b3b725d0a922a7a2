"""What is served, and how much it is asked for: the model, then its adapters."""

from __future__ import annotations

from shoal_cluster.serve.metrics.model_tally import ModelTally
from shoal_cluster.serve.rows import ModelRow
from shoal_cluster.serve.served_adapters import ServedAdapters


def model_rows(model: str, adapters: ServedAdapters, tally: ModelTally) -> tuple[ModelRow, ...]:
    """A row for each name that calls may ask for."""
    rows = []
    for name in (model, *adapters.names):
        num_replicas = adapters.num_replicas("" if name == model else name)
        rows.append(ModelRow(name, num_replicas, *tally.counts(name)))
    return tuple(rows)
