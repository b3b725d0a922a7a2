from __future__ import annotations

import json

from shoal_cluster.serve.member import Member, member_metadata


def test_a_member_is_what_its_replica_has_told() -> None:
    told = json.loads(json.dumps(member_metadata(("10.0.0.1", 7), "tiny", "cpu: weights 0.5", ("10.0.0.1", 8))))
    expected = Member("r", "node", ("10.0.0.1", 7), "cpu: weights 0.5", ("10.0.0.1", 8))
    assert Member.of("r", "node", told, "tiny") == expected
    gives_none = member_metadata(("10.0.0.1", 7), "tiny", "", None)
    assert Member.of("r", "node", gives_none, "tiny") == Member("r", "node", ("10.0.0.1", 7))


def test_a_replica_of_another_model_or_of_something_else_is_none() -> None:
    """Its tokens would mean something else."""
    assert Member.of("r", "node", member_metadata(("10.0.0.1", 7), "large", "", None), "tiny") is None
    assert Member.of("r", "node", {}, "tiny") is None
