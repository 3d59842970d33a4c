"""From open engines to slots that can be served from, and what is left to warm.

Where any shape is as good as another there is nothing to do. Where only warmed cells
may run (TensorRT), a model is ready once a covering set is warm on every slot: the
smallest and the largest batch of each combination of buckets. The rest is warmed while
it is served, and requests go up to the next warm cell until then.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

from batcher.config import BatchingConfig
from batcher.scheduling import POLICIES, PolicyOptions, Scheduler
from batcher.serving.shapes import ModelShapes
from batcher.serving.warmup import WarmUp
from engines import Cell, Engine, EngineError, ExecutionContext, Slot
from engines.costs import CellCost, from_json, measure, to_json
from engines.report import Report, unheard

log = logging.getLogger(__name__)

Tails = tuple[tuple[int, ...], ...]
"""Per input the shape of one row: what a group of requests has in common."""

_FINE: Final = 8  # up to here rungs double, from here on there is one between


class Ready(NamedTuple):
    """What `make_ready` gives; the attributes are those of `LoadedModel`."""

    slots: tuple[Slot, ...]
    warm: dict[Tails, tuple[int, ...]]
    cold: tuple[tuple[Tails, int], ...]
    costs: tuple[CellCost, ...]


def make_ready(
    name: str,
    engines: Sequence[Engine],
    context: ExecutionContext,
    shapes: ModelShapes,
    rungs: tuple[int, ...],
    warmed: WarmUp,
    *,
    per_engine: int,
    report: Report = unheard,
) -> Ready:
    """Makes the slots, and warms on each of them what the first has warm.

    Args:
        name: of the model, for debuggers.
        engines: one per device.
        context: of the first engine, on which the warm-up ran; taken over or closed.
        shapes: the shape rules.
        rungs: batch sizes worth running.
        warmed: what the warm-up has run.
        per_engine: slots on each engine.
        report: told how far it is ("warming slots", "measuring").

    Raises:
        EngineLoadError, MemoryError: a device has not the memory.
    """
    if not engines[0].warmed_cells_only:
        context.close()
        return Ready(
            _slots(name, [(e, None) for e in engines] * per_engine), {}, (), ()
        )
    covering = [(tails, rung) for tails, rung, _ in warmed.costs]
    cells = [shapes.group(tails).cell(rung) for tails, rung in covering]
    made: list[list[ExecutionContext]] = [[] for _ in engines]
    made[0].append(context)

    def warm_up(engine: Engine, contexts: list[ExecutionContext]) -> None:
        while len(contexts) < per_engine:
            report("warming slots", sum(map(len, made)), per_engine * len(engines))
            contexts.append(engine.create_context())
            for cell in cells:
                contexts[-1].warm(cell.inputs)

    slots: tuple[Slot, ...] = ()
    try:
        with ThreadPoolExecutor(len(engines)) as threads:  # devices do not wait
            list(threads.map(warm_up, engines, made))
        report("measuring", 0, 0)
        costs = _costs(engines[0], made[0], cells)
        for engine in engines:
            engine.save_warm()
        # Slots of one device are not neighbours: the first batches go to all devices.
        rounds = zip(*made, strict=True)
        pairs = [pair for r in rounds for pair in zip(engines, r, strict=True)]
        slots = _slots(name, pairs)
        for slot in slots:
            slot.reserve(*cells)
    except BaseException:
        for thing in slots or itertools.chain(*made):
            thing.close()
        raise
    warm: dict[Tails, tuple[int, ...]] = {}
    for tails, rung in covering:
        warm[tails] = tuple(sorted({*warm.get(tails, ()), rung}))
    every = [(tails, rung) for rung in bisected(rungs) for tails in warm]
    cold = tuple(cell for cell in every if cell not in set(covering))
    return Ready(slots, warm, cold, tuple(costs))


def _slots(
    name: str, pairs: Sequence[tuple[Engine, ExecutionContext | None]]
) -> tuple[Slot, ...]:
    return tuple(
        Slot(engine, f"slot {name} #{i}", context=context)
        for i, (engine, context) in enumerate(pairs)
    )


def _costs(
    engine: Engine, contexts: Sequence[ExecutionContext], cells: Sequence[Cell]
) -> list[CellCost]:
    """Those that an earlier start has measured, or measured now and kept."""
    path = engine.costs_path
    wanted = {tuple(map(tuple, cell.inputs)) for cell in cells}
    if path is not None and path.is_file():
        try:
            known = from_json(path.read_text())
            if wanted <= {c.inputs for c in known if c.busy == len(contexts)}:
                return known
        except (OSError, ValueError) as error:
            log.warning("%s is measured again: %s", path, error)
    costs = measure(engine, contexts, cells)
    keep_costs(engine, costs)
    return costs


def keep_costs(engine: Engine, costs: Sequence[CellCost]) -> None:
    """Writes run times where the next start, and the tuner, find them."""
    path = engine.costs_path
    if path is not None:
        try:
            path.write_text(to_json(costs))
        except OSError as error:
            log.warning("run times are not kept: %s", error)


def rung_ladder(least: int, most: int) -> tuple[int, ...]:
    """Batch sizes worth running where each costs warm-up time and memory.

    Doubling up to 8; from there on with one between, so that at most a third of a
    batch is padding: 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, …
    """
    sizes = {least, most}
    size = 1
    while size <= most:
        sizes.add(size)
        if size >= _FINE:
            sizes.add(size * 3 // 2)
        size *= 2
    return tuple(sorted(s for s in sizes if least <= s <= most))


def bisected(values: Sequence[int]) -> list[int]:
    """The values, the ends first, then always the middle of the widest gap."""
    order = list(dict.fromkeys((*values[:1], *values[-1:])))
    gaps = [(0, len(values) - 1)]
    while gaps:
        low, high = max(gaps, key=lambda gap: gap[1] - gap[0])
        gaps.remove((low, high))
        if high - low > 1:
            middle = (low + high) // 2
            order.append(values[middle])
            gaps += [(low, middle), (middle, high)]
    return order


def make_scheduler(config: BatchingConfig, slots: int) -> Scheduler:
    """The scheduler of a model with so many slots."""
    options = PolicyOptions(
        max_delay_ns=config.max_delay_us * 1000, preferred_rows=config.preferred
    )
    policy = POLICIES[config.policy](options)
    return Scheduler(policy, slots=slots, max_queue=config.max_queue)


def close_all(slots: Iterable[Slot], engines: Iterable[Engine]) -> None:
    """Closes slots, then their engines; what fails is said and not raised."""
    closes = [thing.close for thing in slots] + [thing.close for thing in engines]
    for close in closes:
        try:
            close()
        except EngineError as error:
            log.warning("%s", error)
