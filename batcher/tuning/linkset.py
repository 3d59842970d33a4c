"""All connections of a process on one epoll: made, watched, dropped and made again.

Knows sockets and when to look at them; what a connection carries is `worker`'s.
"""

from __future__ import annotations

import select
from typing import TYPE_CHECKING, Final

from batcher.tuning.link import Address, Channel, Link

if TYPE_CHECKING:
    from batcher.tuning.calls import Call

_READ: Final = select.EPOLLIN
_READ_WRITE: Final = select.EPOLLIN | select.EPOLLOUT


class LinkSet:
    """The links of a process and the channels that they have or had.

    Args:
        address: of the server.
        count: how many links there are.
        wake_fd: a descriptor that ends a wait too, when it can be read.
    """

    def __init__(self, address: Address, count: int, wake_fd: int) -> None:
        self.links = [Link(i, address) for i in range(count)]
        """The links; a call's `link` is its index here."""
        self.channels: dict[int, Channel] = {}
        """All open channels by descriptor, those included that a link has left."""
        self.lost = 0
        """Channels that ended, and attempts to connect that failed."""
        self._epoll = select.epoll()
        self._epoll.register(wake_fd, _READ)
        self.poll = self._epoll.poll
        """Wait for some seconds; returns descriptors with what they are ready for."""
        self._writing: set[int] = set()
        self._turn = 0

    @property
    def all_up(self) -> bool:
        """Whether calls can be sent at once on every link."""
        return all(link.up for link in self.links)

    def next_up(self) -> Link:
        """The next link in turn that is up; if none is, the next."""
        for _ in self.links:
            self._turn = (self._turn + 1) % len(self.links)
            link = self.links[self._turn]
            if link.up:
                break
        return link

    def doze(self, wait_ns: int) -> None:
        """Wait until a descriptor is ready, or for `wait_ns` nanoseconds, precisely.

        epoll waits for whole milliseconds; select, on the epoll itself, has
        microseconds.
        """
        if wait_ns > 0:
            select.select([self._epoll.fileno()], [], [], wait_ns / 1e9)

    def flush(self, channel: Channel | None) -> None:
        """Send what a channel has to send, now or when its socket allows."""
        # A socket that takes everything, as nearly all do, costs no more than this.
        if channel is not None and (channel.flush() or self._writing):
            fd = channel.socket.fileno()
            if channel.blocked != (fd in self._writing):
                self._epoll.modify(fd, _READ_WRITE if channel.blocked else _READ)
                (self._writing.add if channel.blocked else self._writing.discard)(fd)

    def connect_due(self, now_ns: int) -> list[tuple[Link, list[Call]]]:
        """Begin the attempts to connect that are due, and end those overdue.

        Returns the calls that were lost by a failure, by link.
        """
        lost = []
        for link in self.links:
            channel = link.channel
            if channel is None and now_ns >= link.retry_at_ns:
                channel = link.connect(now_ns)
                if channel is None:
                    self.lost += 1
                    lost.append((link, link.failed(link.last_fault, now_ns)))
                else:
                    fd = channel.socket.fileno()
                    self.channels[fd] = channel
                    # Writable means connected: the opening is sent then.
                    self._epoll.register(fd, _READ_WRITE)
                    self._writing.add(fd)
            elif channel is not None and link.overdue(now_ns):
                channel.closed = "the server does not answer HTTP/2"
                lost.append((link, self.drop(channel, now_ns)))
        return lost

    def drop(self, channel: Channel, now_ns: int) -> list[Call]:
        """Close a channel; return its calls, which end as UNAVAILABLE."""
        channel.flush()
        fd = channel.socket.fileno()
        self._epoll.unregister(fd)
        self._writing.discard(fd)
        del self.channels[fd]
        channel.socket.close()
        lost = channel.http.close(channel.closed)
        if channel.link.channel is channel:
            self.lost += 1
            lost += channel.link.failed(channel.closed, now_ns)
        return lost

    def close(self) -> None:
        """Close everything."""
        for channel in self.channels.values():
            channel.socket.close()
        self._epoll.close()
