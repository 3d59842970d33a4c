"""What is measured of which model on a GPU, and what all parts of a run share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from batcher.tuning.plan import Body
from benchmarks.gpu_daemon import Daemon, Options
from benchmarks.gpu_load import Served, drive

FULL: Final = 1024
"""Callers that fill every batch."""

Figures = dict[str, Any]
"""Of a model, by part, as the result file has them."""

Sizes = tuple[int, ...]
"""Of a request of one row: its dynamic axes beside the batch."""


class PartError(RuntimeError):
    """A part could not be measured."""


class OutOfTime(RuntimeError):
    """The time for the whole run is over."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured of a model.

    Attributes:
        cells: of the bare engine, as `benchmarks.bare` reads them; those that the
            model's file has not in its grid are left out.
        requests: that are served; the first under every load, others under the largest.
    """

    cells: str
    requests: tuple[Sizes, ...] = ()


PLANS: Final = {
    "bert-base": Plan("1x16,8x16,8x32,32x16,64x16,64x128", ((16,), (128,))),
    "resnet50-u8": Plan("1,8,32,64,128", ((),)),
    "resnet50": Plan("1,8,32,64,128"),
    "minilm": Plan("1x16,32x16,64x16,64x128", ((16,),)),
}
"""By model."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A way to start the daemon, and the loads it gets then.

    Attributes:
        policy, slots: of the daemon.
        callers: of closed loops.
        shares: of the best rate seen, for Poisson arrivals.
        others: callers for requests other than the model's first.
    """

    policy: str
    slots: int
    callers: tuple[int, ...]
    shares: tuple[float, ...]
    others: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.policy}/{self.slots}"


SETTINGS: Final = (
    Setting("eager", 1, (1, 64, 256, FULL), (0.6, 0.8, 0.9), (256, FULL)),
    Setting("eager", 2, (1, 256, FULL), (0.8, 0.9), (FULL,)),
    Setting("window", 1, (FULL,), (0.8, 0.9)),
    Setting("window", 2, (FULL,), (0.9,)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What all parts share.

    Attributes:
        say: prints a line at once.
        save: writes the result file.
        left_s: seconds that the run has left.
        options: of daemons; slots and policy are the part's.
        delay_us: of the `window` policy.
        seconds: of a measured window.
        settings: names of those that are measured; empty for all.
        processes: see `drive`.
        work: a folder for sockets and made-up models.
    """

    say: Callable[[str], None]
    save: Callable[[], None]
    left_s: Callable[[], float]
    options: Options
    delay_us: int
    seconds: float
    settings: tuple[str, ...]
    processes: int
    work: Path

    def with_setting(self, policy: str, slots: int) -> Options:
        """How the daemon is started for a setting."""
        delay_us = self.delay_us if policy == "window" else 0
        return replace(self.options, policy=policy, slots=slots, max_delay_us=delay_us)

    def check_time(self) -> None:
        """Raises OutOfTime when there is none left."""
        if self.left_s() <= 0:
            raise OutOfTime("the time for the whole run (--limit) is over")

    def drive(self, daemon: Daemon, body: Body, slots: int, **load: Any) -> Served:
        """`drive`, if there is time."""
        self.check_time()
        return drive(daemon, body, slots=slots, processes=self.processes, **load)
