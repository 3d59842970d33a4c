"""When a batch closes, and what is in it: the seam for batching policies.

A policy is asked when a slot can take a batch and something waits. It sees the groups
and the time, and answers with a `Choice` or with the instant to be asked again. It
keeps no requests, and never acts by itself. A new policy is one file and one line in
`POLICIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from batcher.scheduling.request import NEVER, Group


class Choice(NamedTuple):
    """Run the head of `group` now: the longest prefix of at most `max_rows` rows."""

    group: Group
    max_rows: int


class Hold(NamedTuple):
    """Run nothing yet; ask again at `until_ns`, or when something changes."""

    until_ns: int


class Policy(Protocol):
    """The interface of every policy."""

    def choose(self, groups: Iterable[Group], now_ns: int) -> Choice | Hold:
        """Decides for a slot that is free (or about to be).

        `groups` are those with something waiting, at least one. An instant in `Hold`
        must lie after `now_ns`.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOptions:
    """The knobs of the policies; each policy documents which of them it heeds."""

    max_delay_ns: int = 0
    """The most a free slot may wait for a fuller batch (0: it never waits)."""

    preferred_rows: tuple[int, ...] = ()
    """Batch sizes that leave before the delay is over (`window` only), ascending."""


class Eager:
    """Runs as soon as a slot is free: batches form while the slots are busy.

    With `max_delay_ns` a free slot waits until the oldest request is that old, or the
    batch is full, whichever is first. Groups go by their oldest request.
    """

    def __init__(self, options: PolicyOptions) -> None:
        self.max_delay_ns = options.max_delay_ns

    def choose(self, groups: Iterable[Group], now_ns: int) -> Choice | Hold:
        return _oldest_due(groups, now_ns, self.max_delay_ns, _no_preference)


class Window:
    """Triton's dynamic batcher: waits out the delay unless a batch is full.

    A batch leaves when (1) the queue holds as much as a batch can, (2) a prefix of the
    queue has a preferred size, or the queue holds more than the largest of these sizes,
    or (3) the oldest request is `max_delay_ns` old, then with all that fits. Without
    preferred sizes the largest batch is the preferred one (protocol notes, "how Triton
    decides"). Unlike Triton a full queue sends a full batch, not a preferred one.
    """

    def __init__(self, options: PolicyOptions) -> None:
        self.max_delay_ns = options.max_delay_ns
        self.preferred = frozenset(options.preferred_rows)
        self._largest = max(options.preferred_rows, default=0)

    def choose(self, groups: Iterable[Group], now_ns: int) -> Choice | Hold:
        return _oldest_due(groups, now_ns, self.max_delay_ns, self._preferred_prefix)

    def _preferred_prefix(self, group: Group) -> int:
        """Rows of the longest prefix that has a preferred size, 0 for none (yet).

        When the queue outgrows the largest size without one: what comes just before,
        or the first request if that alone is larger.
        """
        if not self.preferred:
            return 0
        best = total = 0
        for request in group.living():
            if total + request.rows > self._largest:
                return best or total or request.rows
            total += request.rows
            if total in self.preferred:
                best = total
        return best


def _no_preference(group: Group) -> int:
    return 0


def _oldest_due(
    groups: Iterable[Group],
    now_ns: int,
    max_delay_ns: int,
    preferred_prefix: Callable[[Group], int],
) -> Choice | Hold:
    """Of the groups that may leave now, the one with the oldest request."""
    best: Group | None = None
    best_rows = 0
    best_arrival_ns = held_arrival_ns = NEVER
    for group in groups:
        arrival_ns = group.waiting[0].arrival_ns
        if group.rows >= group.max_rows or now_ns - arrival_ns >= max_delay_ns:
            rows = group.max_rows
        elif not (rows := preferred_prefix(group)):
            if arrival_ns < held_arrival_ns:
                held_arrival_ns = arrival_ns
            continue
        if arrival_ns < best_arrival_ns:
            best, best_rows, best_arrival_ns = group, rows, arrival_ns
    return Choice(best, best_rows) if best else Hold(held_arrival_ns + max_delay_ns)


POLICIES: Final[dict[str, Callable[[PolicyOptions], Policy]]] = {
    "eager": Eager,
    "window": Window,
}
"""Every policy by its name in the configuration."""
