"""One served model version: its scheduler, its slots, its books.

Requests come in by `submit`; `turn` does, on the event loop, everything that is to be
done for the model: takes what its slots have finished, answers, polls the scheduler and
carries out its decisions.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from batcher.errors import BatcherError, EngineFailure, ModelNotReady, QueueFull
from batcher.rpc import messages, response
from batcher.rpc.header import InferPlan
from batcher.rpc.request import ParsedRequest
from batcher.rpc.status import StatusTable
from batcher.rpc.transport import Reply
from batcher.scheduling import NEVER, Dispatch
from batcher.serving.answer import (
    BatchOutputs,
    Layout,
    batch_outputs,
    too_large,
    whole_answer,
)
from batcher.serving.budget import Budget
from batcher.serving.describe import config_message
from batcher.serving.gather import gather
from batcher.serving.loader import LoadedModel
from batcher.serving.readying import Tails, close_all, make_scheduler
from batcher.serving.request import InferRequest
from batcher.serving.statistics import ModelStatistics
from engines import Completion, EngineDeadError, EngineLostError, Slot

if TYPE_CHECKING:
    from batcher.scheduling import Batch, Group
    from batcher.serving.warming import Warming
_SLACK_NS: Final = 2_000_000  # transport and daemon may see a deadline this far apart


class Model:
    """See the module's text.

    Args:
        loaded: what it is made of; the model closes its slots and engines.
        budget: the daemon's, shared by all models.
        status: the table of codes.
        max_answer_bytes: larger answers are refused.
        touch: asks the driver, from any thread, to call `turn` soon.
        touch_here: the same for a request that a transport is handing over.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        budget: Budget,
        status: StatusTable,
        max_answer_bytes: int,
        touch: Callable[[Model], None],
        touch_here: Callable[[Model], None],
    ) -> None:
        self.signature = loaded.signature
        self.config = loaded.config
        self.engines = loaded.engines
        self.shapes = loaded.shapes
        self.rungs = loaded.rungs
        self.statistics = ModelStatistics()
        self.wakeup_ns = NEVER
        self.touched = False  # the driver's mark
        self.dead: BaseException | None = None
        self.warming: Warming | None = None  # of further cells, while it is served
        self.warm_groups: list[Group] = []  # keeps their costs
        self._budget = budget
        self._status = status
        self._max_answer_bytes = max_answer_bytes
        self._touch = touch
        self._touch_here = touch_here
        self._head = response.head(loaded.signature)
        self._refusal: BatcherError | None = None  # why it takes nothing new
        batching = loaded.config.batching
        self._timeout_ns = int(batching.timeout_ms * 1e6)
        self._override = batching.allow_timeout_override
        self.scheduler = make_scheduler(batching, len(loaded.slots))
        self._warm = dict(loaded.warm)
        self.slots = loaded.slots
        for slot in loaded.slots:
            slot.on_done = lambda: touch(self)
        self._running: list[list[tuple[Batch, int, int]]] = [[] for _ in loaded.slots]

    # -- requests -------------------------------------------------------------------

    def plan(
        self, parsed: ParsedRequest, spans: tuple[tuple[int, int], ...]
    ) -> InferPlan:
        """Finds the group of a request, and how its rows fit there.

        Raises:
            InvalidRequest: a size that no bucket holds.
        """
        plan = InferPlan(self, self.signature, parsed, spans)
        plan.fit = self.shapes.fit(parsed.shapes)
        tails = plan.fit.group.in_tails
        plan.group = self.scheduler.group(tails, self.rungs_of(tails))
        plan.timeout_ns = self._timeout_ns
        asked_ns = parsed.parameters.timeout_us * 1000
        if asked_ns and self._override:
            # May shorten the model's limit, or set one where there is none.
            plan.timeout_ns = min(asked_ns, self._timeout_ns or asked_ns)
        return plan

    def rungs_of(self, tails: Tails) -> tuple[int, ...]:
        """The batch sizes that may be run of rows with these shapes."""
        return self._warm.get(tails, self.rungs)

    def use_rung(self, tails: Tails, rung: int, run_ns: int) -> None:
        """From now on batches of this size, which take so long, may be run."""
        rungs = tuple(sorted({*self._warm.get(tails, ()), rung}))
        self._warm[tails] = rungs
        self.scheduler.use_rungs(tails, rungs)
        if run_ns:
            self.scheduler.group(tails, rungs).cost.record(rung, run_ns)

    def submit(
        self,
        plan: InferPlan,
        payload: bytes,
        base: int,
        id_field: bytes,
        reply: Reply,
        call: Any,
        deadline_ns: int | None,
    ) -> InferRequest:
        """Queues a request; its answer goes to `reply`.

        Raises:
            QueueFull, PayloadTooLarge: the queue or the bytes in flight are at limit.
            ModelNotReady, ShuttingDown: the model takes nothing new.
        """
        if self._refusal is not None:
            raise copy.copy(self._refusal)
        budget = self._budget
        size = len(payload)
        if budget.used + size > budget.limit:
            self.statistics.fail("REJECTED", 0)
            raise budget.refusal(size)
        now_ns = time.monotonic_ns()
        request = InferRequest(
            plan,
            payload,
            base,
            id_field,
            reply,
            call,
            NEVER if deadline_ns is None else deadline_ns,
            now_ns + plan.timeout_ns if plan.timeout_ns else NEVER,
        )
        try:
            self.scheduler.submit(request, now_ns)
        except QueueFull:
            self._submit_again(request, now_ns)
        budget.used += size
        if not self.touched:
            self._touch_here(self)
        return request

    def _submit_again(self, request: InferRequest, now_ns: int) -> None:
        """What fills the queue may be of this very wake-up, and a slot free for it."""
        self._poll(now_ns)
        try:
            self.scheduler.submit(request, now_ns)
        except QueueFull:
            self.statistics.fail("REJECTED", 0)
            raise

    def cancel(self, request: InferRequest) -> None:
        """The caller has gone: its request is taken out, or its rows dropped."""
        if request.reply is not None:
            now_ns = time.monotonic_ns()
            self.scheduler.cancel(request)
            self._forget(request)
            late = request.deadline_ns <= now_ns + _SLACK_NS  # gRPC was first to notice
            kind = "REJECTED" if late else "CANCELED"
            self.statistics.fail(kind, now_ns - request.arrival_ns)
            self._touch(self)  # a batch behind it may be complete now

    # -- the turn -------------------------------------------------------------------

    def turn(self, now_ns: int) -> None:
        """Does everything that is to be done now; sets `wakeup_ns`."""
        answered = False
        for index, slot in enumerate(self.slots):
            for completion in slot.completions():
                self._completed(index, slot, completion, now_ns)
                answered = True
        if not answered:  # else it has polled
            self._poll(now_ns)
        self.wakeup_ns = self.scheduler.next_wakeup_ns()

    def _poll(self, now_ns: int) -> None:
        for decision in self.scheduler.poll(now_ns):
            if isinstance(decision, Dispatch):
                self._dispatch(decision.slot, decision.batch)
            else:
                self._fail(decision.request, decision.error)  # type: ignore[arg-type]

    def _dispatch(self, index: int, batch: Batch) -> None:
        slot = self.slots[index]
        staging = slot.acquire()
        begin_ns = time.monotonic_ns()
        fault: Exception | None = None
        try:
            gather(batch, staging, self.shapes)
        except Exception as error:  # out of memory; or a fault of ours in one request
            fault = error
        self._running[index].append((batch, begin_ns, time.monotonic_ns() - begin_ns))
        if fault is not None:
            slot.fail(staging, fault)
        else:
            fit = batch.requests[0].plan.fit.group  # type: ignore[attr-defined]
            slot.start(staging, fit.cell(batch.rung))

    def _completed(
        self, index: int, slot: Slot, completion: Completion, now_ns: int
    ) -> None:
        batch, begin_ns, gathered_ns = self._running[index].pop(0)
        error: BatcherError | None = None
        outputs: BatchOutputs | None = None
        if isinstance(completion.error, EngineLostError):
            self.lose()
            error = self._refusal
        elif completion.error is not None:
            error = EngineFailure(
                f"model {self.signature.name!r} failed: {completion.error}"
            )
        else:
            try:
                outputs = batch_outputs(completion, batch.rung, self.shapes)
            except BatcherError as wrong:
                error = wrong
        dead = isinstance(completion.error, EngineDeadError)
        if dead and self.dead is None:
            self.dead = completion.error
            name = self.signature.name
            self._refusal = ModelNotReady(f"model {name!r}: its engine is dead")
        run_ns = completion.ended_ns - completion.started_ns
        self.scheduler.complete(index, now_ns, run_ns, error, retry=not dead)
        try:
            self._poll(now_ns)  # the slot's next batch first, then these answers
        finally:
            if outputs is not None:
                started_ns = max(completion.started_ns, begin_ns)
                self._answer(batch, outputs, started_ns, run_ns, gathered_ns)
            slot.release(completion.staging)

    def _answer(
        self,
        batch: Batch,
        outputs: BatchOutputs,
        started_ns: int,
        run_ns: int,
        gathered_ns: int,
    ) -> None:
        head = self._head
        requests: list[InferRequest] = batch.requests  # type: ignore[assignment]
        begin_ns = time.monotonic_ns()
        row = rows = freed = 0
        arrivals: list[int] = []
        plan: InferPlan | None = None
        layout: Layout | None = None
        for request in requests:
            reply = request.reply
            if request.parent is not None:
                self._answer_part(request, outputs, row, started_ns, run_ns)
            elif reply is not None:
                if request.plan is not plan:  # neighbours mostly have the same
                    plan = request.plan
                    layout = outputs.layout(plan)
                answer = outputs.answer(head, request, row, layout)
                if len(answer) <= self._max_answer_bytes:
                    reply.respond(request.call, answer)
                    request.reply = None
                    freed += len(request.payload)
                    arrivals.append(request.arrival_ns)
                    rows += request.rows
                else:
                    self._fail(request, too_large(answer, self._max_answer_bytes))
            row += request.rows
        self._budget.used -= freed
        end_ns = time.monotonic_ns()
        stats = self.statistics
        stats.run(batch.rows, batch.rung, gathered_ns, run_ns, end_ns - begin_ns)
        if arrivals:
            stats.answered(
                arrivals, rows, started_ns, end_ns, gathered_ns, run_ns, begin_ns
            )

    def _answer_part(
        self,
        part: InferRequest,
        outputs: BatchOutputs,
        row: int,
        started_ns: int,
        run_ns: int,
    ) -> None:
        """Keeps a part's rows; answers the whole request with its last part."""
        whole: InferRequest = part.parent  # type: ignore[assignment]
        if whole.reply is None:
            return
        part.chunks = outputs.chunks(part, row)
        parts: list[InferRequest] = whole.parts  # type: ignore[assignment]
        if any(p.chunks is None for p in parts):
            return
        try:
            answer = whole_answer(self._head, whole, self._max_answer_bytes)
        except BatcherError as error:
            self._fail(whole, error)
            return
        finally:
            whole.parts = None  # parts hold their parent: no cycle must keep the rows
        whole.reply.respond(whole.call, answer)
        self._forget(whole)
        now_ns = time.monotonic_ns()
        self.statistics.answered(
            [whole.arrival_ns], whole.rows, started_ns, now_ns, 0, run_ns, now_ns
        )

    def _fail(self, request: InferRequest, error: BatcherError) -> None:
        reply = request.reply
        if reply is None:
            return
        call = request.call
        self._forget(request)
        reason = "BACKEND" if isinstance(error, EngineFailure) else "REJECTED"
        self.statistics.fail(reason, time.monotonic_ns() - request.arrival_ns)
        reply.fail(call, *self._status.status(error))

    def _forget(self, request: InferRequest) -> None:
        request.reply = None
        request.call = None
        self._budget.used -= len(request.payload)
        request.payload = b""

    # -- life -----------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether it takes requests."""
        return self._refusal is None

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return self.scheduler.idle

    def drain(self, refusal: BatcherError) -> None:
        """Takes nothing new, and answers that with `refusal`; what was accepted is run
        without waiting for more."""
        self._refusal = refusal
        self.scheduler.drain()
        self._touch(self)

    def lose(self) -> None:
        """Its engine's process has ended: all that is in it may be tried again."""
        if self.dead is None:
            text = "its engine has ended, and is started again"
            refusal = ModelNotReady(f"model {self.signature.name!r}: {text}")
            self.dead = self._refusal = refusal
            self._give_up(refusal)

    def abandon(self, bug: BaseException) -> None:
        """After a fault of ours in `turn`: nobody is left waiting for an answer."""
        model = f"model {self.signature.name!r}"
        self.dead = bug
        self._refusal = ModelNotReady(f"{model} has failed (see the log)")
        self._give_up(EngineFailure(f"{model}: internal error (see the log)"))

    def _give_up(self, error: BatcherError) -> None:
        for request in self.scheduler.abandon():
            self._fail(request, error)  # type: ignore[arg-type]

    def close(self) -> None:
        """Ends the slots and closes the engines; call it when idle or lost."""
        if self.warming is not None:
            self.warming.stop()
        close_all(self.slots, self.engines)

    def refused(self) -> None:
        """Counts a request that did not pass validation."""
        self.statistics.fail("OTHER", 0)

    def config_message(self) -> messages.ModelConfig:
        """The configuration in force, as Triton's message."""
        return config_message(self.signature, self.config, self.rungs)

    def message(self) -> messages.ModelStatistics:
        """Its books as Triton's message."""
        return self.statistics.message(self.signature.name, self.signature.version)
