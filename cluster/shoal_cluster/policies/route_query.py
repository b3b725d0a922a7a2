"""What routing needs to know of a request."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal_cluster.policies.columns import Phase
from shoal_replica.prefix_cache import BlockHash, hash_blocks
from shoal_replica.request import Request

PRICED_STEPS = 128
BYTES_PER_PASSED = 96  # an entry of ``RouteQuery.passed``: tuple, integer and reference; the replica's id is shared


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteQuery:
    """What routing needs to know of a request.

    Attributes:
        block_hashes: hashes of the prompt's full blocks.
        num_prompt_tokens: those that must be computed where none of it is cached: all but what comes with it.
        num_blocks_needed: blocks that the request needs to start: those of its prompt and of its first token.
        excluded: replicas that have refused or lost the request already, or lack its adapter.
        decode_steps: steps in which it will decode beside other sequences, as far as they are priced: the tokens that
            it may still generate, at most ``PRICED_STEPS``.
        passed: pairs of a replica's id and the prompt tokens waiting there that this request goes ahead of, because
            their tenants yield to its own.
        phase: what it is sent for, where replicas have roles: it goes to those for this phase.
        num_known_blocks: leading blocks of the prompt that some replica has cached, if other held requests begin with
            the same ones.
        num_alike: how many requests begin so, this one included, rounded down.
        num_holders: replicas that cache these blocks. If one more computes them, it will serve about ``num_alike /
            (num_holders + 1)`` of the requests, so each is charged only its share of the cost.
        patience_tokens: prompt tokens that it waits for, until its own first token, at the cheapest replica. If there
            are more, it goes to one that has nothing to compute and where there are fewer. None: it waits for all.
    """

    request_id: str
    block_hashes: tuple[BlockHash, ...]
    num_prompt_tokens: int
    num_blocks_needed: int
    block_size: int
    excluded: frozenset[str] = frozenset()
    decode_steps: int = PRICED_STEPS
    passed: tuple[tuple[str, int], ...] = ()
    phase: Phase = ""
    num_known_blocks: int = 0
    num_alike: int = 1
    num_holders: int = 0
    patience_tokens: int | None = None

    @property
    def spared(self) -> float:
        """The fraction of the cost of known blocks on one more replica that the other requests are charged."""
        return max(0.0, 1.0 - (self.num_holders + 1) / self.num_alike)

    def anew(self) -> RouteQuery:
        """The same for a decision at another time: what it says of other requests is out of date."""
        return replace(self, passed=(), num_known_blocks=0, num_alike=1, num_holders=0, patience_tokens=None)

    def with_blocks_given(self, num_blocks: int) -> RouteQuery:
        """The same where so many of its leading blocks come from another replica: they take room, but no computing."""
        return replace(self, num_prompt_tokens=max(1, self.num_prompt_tokens - num_blocks * self.block_size))

    @property
    def is_restricted(self) -> bool:
        """Whether there may be replicas that it must not go to, whatever their size."""
        return bool(self.excluded or self.phase)

    @classmethod
    def for_request(cls, request: Request, block_size: int, is_caching: bool = True) -> RouteQuery:
        """The query that places ``request``. Tokens that another replica has generated count as prompt. There are no
        block hashes unless the replicas cache prefixes (``is_caching``), and this one's too.
        """
        token_ids, separation = request.known_token_ids(), (request.cache_salt, request.adapter)
        return cls(
            request_id=request.request_id,
            block_hashes=tuple(hash_blocks(token_ids, block_size, *separation))
            if is_caching and request.uses_prefix_cache
            else (),
            num_prompt_tokens=len(token_ids),
            num_blocks_needed=-(-(len(token_ids) + 1) // block_size),
            block_size=block_size,
            decode_steps=priced_steps(request.sampling_params.max_tokens, len(request.output_token_ids)),
        )


def priced_steps(max_tokens: int | None, num_generated: int = 0) -> int:
    """``RouteQuery.decode_steps`` of a request; it may generate ``max_tokens`` in all, None for no limit."""
    return PRICED_STEPS if max_tokens is None else min(PRICED_STEPS, max(1, max_tokens - num_generated))


def uncached_tokens(query: RouteQuery, num_matched_blocks: int) -> int:
    """Prompt tokens to compute where that many blocks are cached: at least one, as its logits are needed."""
    return max(1, query.num_prompt_tokens - num_matched_blocks * query.block_size)


def uncached_blocks(query: RouteQuery, num_matched_blocks: int) -> int:
    """Blocks that the request needs there beyond the cached ones: what to reserve."""
    return max(0, query.num_blocks_needed - num_matched_blocks)
