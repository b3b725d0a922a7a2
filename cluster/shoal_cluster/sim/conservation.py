"""Conservation laws that every finished run must satisfy."""

from __future__ import annotations

from shoal_cluster.sim.cluster import SimCluster


def check_conservation(cluster: SimCluster) -> None:
    """Assert that every request ended once, every token is accounted for, no request, block or reservation is held any
    more, and the gateways' views match the replicas.
    """
    config, book = cluster.config, cluster.book
    assert book.num_open == 0
    for gateway in cluster.gateways:
        gateway.view.check_invariants()
        assert not gateway.queue
        assert not len(gateway.view.index.expected), "a prompt that nobody computes any more is expected"
    for request_id, outcome in book.outcomes.items():
        assert (outcome.finished_s is None) != (outcome.refusal is None), request_id
        if outcome.finished_s is not None:
            room = config.cache.num_blocks * config.cache.block_size - outcome.num_prompt_tokens
            expected = min(book.requests[request_id].num_output_tokens, room)
            assert outcome.num_output_tokens == expected, (request_id, outcome.num_output_tokens, expected)
        assert all(gateway.view.reservation(request_id) is None for gateway in cluster.gateways), request_id
    num_generated, retired = 0, {replica.replica_id for replica in cluster.retired}
    for ended in cluster.ended():  # also checks each replica's own invariants
        num_generated += ended.stats.num_generated_tokens
        num_held = ended.num_cached_blocks
        for gateway in cluster.gateways:
            if ended.replica_id in retired:
                continue
            index, known = gateway.view.index, gateway.view.index.num_held(ended.replica_id)
            # An index that evicted entries for lack of room may know fewer blocks than are cached, never more.
            is_true = known <= num_held if index.num_evicted else known == num_held
            assert is_true, f"{ended.replica_id} holds {num_held} blocks; a gateway's index says {known}"
    assert num_generated == sum(o.num_output_tokens for o in book.outcomes.values())
