"""Which replica takes a request. Ray Serve imports this module by its name, so it needs ray."""

import random
from typing import Any

from skipstone.utils.extras import installed

HashRouter = installed("ray.serve.experimental.consistent_hash_router", "routing needs Ray Serve", "ray").ConsistentHashRouter
"""Ray's router that keeps a session on one replica by consistent hashing."""
NUM_CHOICES = 2
"""Replicas that are compared if no session decides: two choices balance nearly as well as all."""


class SessionRouter(HashRouter):
    """Keeps a conversation on the replica that has its prefix. If that replica has no free row, or the request belongs to no
    conversation, the less loaded of two replicas takes it."""

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Ranks of replicas. Serve tries the first rank for a free row, then the next one."""
        ranks = await super().choose_replicas(candidate_replicas, pending_request)
        if pending_request is None or not ranks:
            return ranks
        homes = ranks[0] if pending_request.metadata.session_id else []
        others = [one for one in candidate_replicas if one not in homes]
        return [rank for rank in (homes, random.sample(others, min(NUM_CHOICES, len(others)))) if rank]
