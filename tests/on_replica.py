"""What code on a replica asks for."""

import unisono as uo


def replica() -> uo.ReplicaContext:
    context = uo.get_replica_context()
    assert context is not None
    return context


def replica_id() -> int:
    return replica().replica_id_in_sync_group
