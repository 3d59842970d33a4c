"""The pure core: requests, queues, costs, policies and decisions.

Imports nothing that does input or output, waits or reads a clock; of ours only
`batcher.errors`. Times are integer nanoseconds that the caller passes in.
"""

from batcher.scheduling.cost import CostRow
from batcher.scheduling.decisions import Decision, Dispatch, Reject
from batcher.scheduling.policy import (
    POLICIES,
    Choice,
    Hold,
    Policy,
    PolicyOptions,
)
from batcher.scheduling.request import DONE, NEVER, Batch, Group, Request
from batcher.scheduling.scheduler import Scheduler

__all__ = [
    "DONE",
    "NEVER",
    "POLICIES",
    "Batch",
    "Choice",
    "CostRow",
    "Decision",
    "Dispatch",
    "Group",
    "Hold",
    "Policy",
    "PolicyOptions",
    "Reject",
    "Request",
    "Scheduler",
]
