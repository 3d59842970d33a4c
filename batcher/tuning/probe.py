"""The requests before the run: one of each body, to stop early and say why.

They go through the same HTTP/2 client as the load, one after another on a connection
of their own, so that what is wrong with a body shows in words instead of in a count.
"""

from __future__ import annotations

import select
import time
from typing import TYPE_CHECKING

from batcher.errors import BatcherError
from batcher.tuning.calls import Call, requests_of
from batcher.tuning.headers import PENDING
from batcher.tuning.link import Address, Link

if TYPE_CHECKING:
    from batcher.tuning.link import Channel
    from batcher.tuning.plan import Body


def probe(target: str, bodies: tuple[Body, ...], timeout_s: float) -> list[Call]:
    """Send one request of each body; return the calls, whose codes are set.

    Raises:
        BatcherError: there is no HTTP/2 server at `target`, it went away, or a call
            got no answer within `timeout_s` seconds.
        ConfigError: `target` is not an address, or a body's metadata cannot be sent.
    """
    address = Address(target)
    requests = requests_of(bodies, address.authority)
    give_up_at_ns = time.monotonic_ns() + int(timeout_s * 1e9)
    link = Link(0, address)
    for _ in range(address.attempts):
        channel = link.connect(time.monotonic_ns())
        if channel is not None:
            _wait(channel, None, give_up_at_ns)
            if channel.http.ready:
                break
            link.last_fault = channel.closed or channel.http.error or "no answer"
            channel.socket.close()
        link.failed(link.last_fault, time.monotonic_ns())
    else:
        raise BatcherError(f"no server at {target}: {link.last_fault}")
    link.opened()
    calls = []
    try:
        for body, request in zip(bodies, requests, strict=True):
            call = Call(request, time.monotonic_ns(), 0, False)
            call.payload = bytearray()
            calls.append(call)
            give_up_at_ns = call.due_ns + int(timeout_s * 1e9)
            link.submit([call])
            _wait(channel, call, give_up_at_ns)
            if call.code == PENDING:
                fault = channel.closed or channel.http.error
                what = fault or f"no answer within {timeout_s:g} s"
                raise BatcherError(
                    f"request before the run ({body.label or 'body'}) to {target}: "
                    f"{what}"
                )
    finally:
        channel.socket.close()
    return calls


def _wait(channel: Channel, call: Call | None, give_up_at_ns: int) -> None:
    """Drive a channel until a call has ended or, without one, the peer is ready."""
    sock = channel.socket
    # Not writable yet means not connected: nothing can be flushed before.
    blocked = True
    while not channel.closed and not channel.http.error:
        if channel.http.ready if call is None else call.code != PENDING:
            return
        left_s = (give_up_at_ns - time.monotonic_ns()) / 1e9
        if left_s <= 0:
            return
        select.select([sock], [sock] if blocked else [], [], left_s)
        data = channel.receive()
        if data:
            channel.http.receive(data)
        blocked = not channel.closed and channel.flush()
