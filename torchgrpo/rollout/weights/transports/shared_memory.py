"""The transport `shared_memory`: anonymous memory that all engines of this host map."""

from torchgrpo.plan.plan import Plan
from torchgrpo.rollout.weights.host_copy import SharedMemory, Transport


def make_transport(plan: Plan) -> Transport:
    return Transport(SharedMemory())
