"""What the two benchmarks share: their arguments, and rounds over all servers in turn.

Servers are measured A B C A B C, each started afresh, so that the drift of a noisy
machine hits all alike. A server that fails twice is left out of later rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.load import LoadError
from benchmarks.running import Running, Sample, ServerError, started
from benchmarks.servers import Server, Work, ours, peers

Measure = Callable[[Running], Iterable[Sample]]


def add_arguments(
    parser: argparse.ArgumentParser, *, rounds: int, seconds: float
) -> None:
    """Those that both benchmarks take."""
    names = ",".join(peers())
    parser.add_argument(
        "--transports",
        type=_names,
        default=["native", "grpcio"],
        help="of our daemon (default: native,grpcio; none: '')",
    )
    parser.add_argument(
        "--peers", type=_names, default=_names(names), help=f"default: {names}"
    )
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument(
        "--seconds", type=float, default=seconds, help="of every measured run"
    )
    parser.add_argument(
        "--retries",
        type=int,
        default=2,
        help="of a run that other processes disturbed (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, help="write everything measured here")
    parser.add_argument("--python", default=sys.executable, help="that runs our daemon")


def chosen(args: argparse.Namespace) -> list[Server]:
    """The servers of this run; says which are left out, and why.

    Raises:
        SystemExit: an unknown peer.
    """
    known = peers()
    servers = [ours(transport, args.python) for transport in args.transports]
    for name in args.peers:
        if name not in known:
            sys.exit(f"unknown peer {name!r}; there are: {', '.join(known)}")
        if reason := known[name].missing():
            print(f"skipped {name}: {reason}", file=sys.stderr)
        else:
            servers.append(known[name])
    return servers


@dataclass(slots=True)
class Session:
    """The rounds, and what came of them."""

    work: Work
    pinned: bool
    samples: list[tuple[int, Sample]] = field(default_factory=list)
    """With the number of the round."""

    failures: dict[str, list[str]] = field(default_factory=dict)
    """By server's name."""

    interrupted: bool = False

    def round(self, number: int, servers: Sequence[Server], measure: Measure) -> None:
        """Measures every server that has not failed twice, once."""
        for server in servers:
            if len(self.failures.get(server.name, ())) > 1:
                continue
            print(f"round {number}: {server.name} …", file=sys.stderr, flush=True)
            try:
                with started(server, self.work, pinned=self.pinned) as running:
                    for sample in measure(running):
                        self.samples.append((number, sample))
            except (ServerError, LoadError) as error:
                self.failures.setdefault(server.name, []).append(str(error))
                print(f"FAILED {error}", file=sys.stderr)

    @contextlib.contextmanager
    def until_interrupted(self) -> Iterator[None]:
        """Lets Ctrl-C and SIGTERM end the rounds: servers are stopped, and what was
        measured so far is still reported.
        """
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            yield
        except KeyboardInterrupt:
            self.interrupted = True
            print("interrupted: reporting what there is", file=sys.stderr)
        finally:
            signal.signal(signal.SIGTERM, before)

    def exit_status(self) -> int:
        """1 when interrupted or our own daemon failed; a peer's is only reported."""
        failed = any(name.startswith("ours-") for name in self.failures)
        return int(self.interrupted or failed)


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]
