"""The transport `object_store`: Ray's object store, for engines on other hosts."""

from torchgrpo.plan.plan import Plan
from torchgrpo.rollout.weights.host_copy import ObjectStore, Transport


def make_transport(plan: Plan) -> Transport:
    return Transport(ObjectStore())
