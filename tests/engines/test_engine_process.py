"""The life of an engine's process: how it opens, what it says, how it ends."""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import process_engines as scripts
import pytest
from process_engines import Scripted, value

from engines import (
    Cell,
    Engine,
    EngineDeadError,
    EngineLoadError,
    EngineRunError,
    FakeEngine,
    FakeOptions,
    Slot,
)
from engines.base import PipelinedContext
from engines.errors import EngineLostError
from engines.process import ProcessEngine, open_in_process

WAIT_S = 30


class Losses:
    """What `on_lost` was told."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.rung = threading.Event()

    def __call__(self, text: str) -> None:
        self.texts.append(text)
        self.rung.set()

    def wait(self) -> list[str]:
        """Everything, once there is something."""
        assert self.rung.wait(WAIT_S)
        return self.texts


@pytest.fixture
def losses() -> Losses:
    """To be given as `on_lost`."""
    return Losses()


@pytest.fixture
def engine(losses: Losses) -> Iterator[ProcessEngine]:
    """A `Scripted` in a process."""
    opened = open_in_process(Scripted, name="scripted", on_lost=losses)
    yield opened
    opened.close()


def children() -> dict[int, str]:
    """The processes that this one has started, with their command lines."""
    pids: list[str] = []
    for thread in os.listdir("/proc/self/task"):
        pids += Path(f"/proc/self/task/{thread}/children").read_text().split()
    return {int(pid): Path(f"/proc/{pid}/cmdline").read_text() for pid in pids}


def pid_of(name: str) -> int:
    """The process of the engine with this name."""
    (pid,) = [pid for pid, line in children().items() if f"\0{name}\0" in line]
    return pid


def ended(pid: int) -> bool:
    """Whether a process ends within 2 s."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    try:
        return bool(poller.poll(2_000))
    finally:
        os.close(descriptor)


def held() -> tuple[int, list[str], int, dict[int, str]]:
    """Descriptors, threads, shared mappings and children of this process."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    threads = sorted(thread.name for thread in threading.enumerate())
    descriptors = len(os.listdir("/proc/self/fd"))
    return descriptors, threads, maps.count("engine-buffer"), children()


def under_way(
    count: int, start: Callable[[], Any]
) -> tuple[list[Any], Callable[[], None]]:
    """Errors of `count` threads that call `start`, and what waits for their end."""
    errors: list[Any] = []

    def attempt() -> None:
        try:
            start()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=attempt) for _ in range(count)]
    for thread in threads:
        thread.start()

    def join() -> None:
        for thread in threads:
            thread.join(WAIT_S)

    return errors, join


# -- opening --------------------------------------------------------------------------


def test_an_engine_says_of_itself_what_it_says_here(engine: ProcessEngine) -> None:
    """Every attribute that engines declare is that of the engine in the process."""
    here = Scripted()

    assert [getattr(engine, name) for name in Engine.__annotations__] == [
        getattr(here, name) for name in Engine.__annotations__
    ]
    assert engine.costs_path == Path("costs.json")


def test_the_process_imports_what_the_engine_needs_only() -> None:
    """Neither the daemon nor its libraries: it starts quickly and is small."""
    engine = open_in_process(scripts.loaded, name="loaded")
    loaded = set(engine.backend.split())
    engine.close()

    assert "numpy" in loaded
    assert loaded.isdisjoint({"batcher", "grpc", "typer", "onnxruntime", "pytest"})


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        (partial(scripts.refuse, "m.onnx: no such file"), "^m.onnx: no such file$"),
        (partial(int, colour="red"), "TypeError: 'colour' is an invalid"),
        (lambda: Scripted(), "^m: the recipe cannot be sent to a process .*lambda"),
        (partial(scripts.crash, scripts.KILLED), "^m: .* ended by SIGKILL .* opened$"),
        (partial(scripts.crash, scripts.EXITS), "^m: .* exit code 3 while it was ope"),
        (partial(scripts.crash, scripts.RUN_ERROR), "^no such row$"),
    ],
)
def test_why_an_engine_cannot_be_opened_is_told(
    recipe: Callable[[], Engine], says: str, losses: Losses
) -> None:
    """What the recipe raises, or how the process ended; and nothing is left of it."""
    before = held()

    with pytest.raises((EngineLoadError, EngineRunError), match=says):
        open_in_process(recipe, name="m", on_lost=losses)

    assert held() == before
    assert losses.texts == []


def test_opening_can_be_given_up(tmp_path: Path) -> None:
    """A process that opens for too long is ended when the caller says so."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    begun = threading.Event()

    def listen() -> None:
        pipe.read_text()
        begun.set()

    threading.Thread(target=listen).start()
    with pytest.raises(EngineLoadError, match="m: given up"):
        open_in_process(partial(scripts.stall, pipe), name="m", cancelled=begun.is_set)

    assert not any("\0m\0" in line for line in children().values())


def test_a_process_that_is_killed_while_opening_is_noticed(tmp_path: Path) -> None:
    """The caller does not wait for an engine that will never be opened."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    recipe = partial(scripts.stall, pipe)
    errors, join = under_way(1, lambda: open_in_process(recipe, name="m"))

    os.kill(int(pipe.read_text()), signal.SIGKILL)
    join()

    assert isinstance(errors[0], EngineLoadError)
    assert "SIGKILL" in str(errors[0])


def test_the_main_module_is_not_run_again(tmp_path: Path) -> None:
    """A script without a guard opens one process; its own functions are no recipes."""
    script = tmp_path / "script.py"
    script.write_text(
        "from engines.process import open_in_process\n"
        "from engines.fake import FakeEngine\n"
        "def recipe(): return FakeEngine(None)\n"
        "print('main')\n"
        "try:\n    open_in_process(recipe, name='m')\n"
        "except Exception as error:\n    print(type(error).__name__, error)\n"
    )
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=WAIT_S
    )

    assert done.stdout.startswith("main\nEngineLoadError the engine's process cannot")
    assert "not the main one" in done.stdout
    assert done.stdout.count("main\n") == 1


def test_a_process_outlives_the_thread_that_has_opened_it(losses: Losses) -> None:
    """Only the end of the whole parent ends it."""
    opened: list[ProcessEngine] = []
    thread = threading.Thread(
        target=lambda: opened.append(
            open_in_process(Scripted, name="m", on_lost=losses)
        )
    )
    thread.start()
    thread.join()

    assert value(opened[0].create_context(), 7) == [7]
    opened[0].close()
    assert losses.texts == []


# -- ending ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "says"),
    [
        (scripts.KILLED, "^scripted: the engine's process was ended by SIGKILL"),
        (scripts.SEGFAULT, "^scripted: the engine's process was ended by SIGSEGV"),
        (scripts.EXITS, "^scripted: the engine's process ended with exit code 3"),
        (scripts.DEAD, "^the device is lost$"),
    ],
)
def test_a_run_that_ends_the_process_says_how(
    engine: ProcessEngine, losses: Losses, order: int, says: str
) -> None:
    """It fails, as does every later call; whoever wants to know is told once."""
    context, other = engine.create_context(), engine.create_context()

    for call in (
        partial(value, context, order),
        partial(value, context, 1),
        partial(value, other, 1),
        partial(context.warm, [(1,)]),
        engine.create_context,
        engine.save_warm,
    ):
        with pytest.raises(EngineLostError, match=says):
            call()

    context.close()
    other.close()
    engine.close()
    assert losses.texts == [engine.lost]


def test_runs_under_way_end_with_the_process(
    engine: ProcessEngine, losses: Losses
) -> None:
    """Threads that wait for runs, for warming or to create a context are woken."""
    contexts = [engine.create_context() for _ in range(3)]
    queue = iter(contexts)

    def hang() -> None:
        context = next(queue)
        assert isinstance(context, PipelinedContext)
        arrays = [np.array([scripts.HANGS])]
        launch = context.launch(arrays, [None])
        context.launch(arrays, [None])
        launch.wait()

    errors, join = under_way(3, hang)
    warm_errors, join_warm = under_way(1, lambda: contexts[0].warm([(1,)]))
    os.kill(pid_of("scripted"), signal.SIGKILL)
    join()
    join_warm()

    assert [type(error) for error in errors + warm_errors] == [EngineLostError] * 4
    assert len(losses.wait()) == 1


def test_a_process_that_is_killed_while_idle_is_noticed(
    engine: ProcessEngine, losses: Losses
) -> None:
    """Its loss is told at once; its memory stays readable and writable."""
    context = engine.create_context()
    buffer = engine.host_buffer(16)
    buffer[:8] = np.int64(5).tobytes()

    os.kill(pid_of("scripted"), signal.SIGKILL)

    assert "SIGKILL" in losses.wait()[0]
    buffer[8:] = buffer[:8]
    assert np.frombuffer(buffer, np.int64).tolist() == [5, 5]
    assert len(engine.host_buffer(100)) == 100
    with pytest.raises(EngineLostError):
        value(context, 1)


def test_slots_of_a_lost_process_are_dead(engine: ProcessEngine) -> None:
    """A slot's runs end with the loss, those that were queued too."""
    rung = threading.Semaphore(0)
    slot = Slot(engine, "slot", rung.release)
    cell = Cell([(1,)], [(1,)])
    for first in (1, scripts.HANGS, 2):
        staging = slot.acquire()
        staging.reserve_input(0, 8)[:8] = np.int64(first).tobytes()
        slot.start(staging, cell)
    assert rung.acquire(timeout=WAIT_S)
    os.kill(pid_of("scripted"), signal.SIGKILL)
    for _ in range(2):
        assert rung.acquire(timeout=WAIT_S)
    done = slot.completions()
    slot.close()

    assert [type(c.error) for c in done] == [type(None), *[EngineLostError] * 2]
    assert isinstance(slot.dead, EngineDeadError)


def test_whoever_hears_of_the_loss_may_close_the_engine() -> None:
    """`on_lost` is called when everything is in order to be closed."""
    engines: list[ProcessEngine] = []
    closed = threading.Event()

    def close(text: str) -> None:
        engines[0].close()
        closed.set()

    engines.append(open_in_process(Scripted, name="m", on_lost=close))
    os.kill(pid_of("m"), signal.SIGKILL)

    assert closed.wait(WAIT_S)


def test_nothing_is_left_of_closed_engines(losses: Losses) -> None:
    """No descriptor, thread, mapping or process, however often it is done."""
    before = held()
    for _ in range(10):
        engine = open_in_process(Scripted, name="m", on_lost=losses)
        slot = Slot(engine, "slot")
        slot.reserve(Cell([(1_000,)], [(1_000,)]))
        slot.close()
        left_open = engine.create_context()
        assert value(left_open, 7) == [7]
        for _ in range(2):
            engine.close()
        with pytest.raises(EngineLostError, match="m: the engine is closed"):
            value(left_open, 7)
        left_open.close()
        del engine, slot, left_open

    assert held() == before
    assert losses.texts == []


def test_an_engine_that_nobody_refers_to_ends(losses: Losses) -> None:
    """As one in a thread does; and that is no loss."""
    before = held()
    engine = open_in_process(Scripted, name="m", on_lost=losses)
    context = engine.create_context()
    pid = pid_of("m")
    assert value(context, 7) == [7]
    del engine
    assert value(context, 8) == [8]
    watcher = next(t for t in threading.enumerate() if t.name == "m-process")
    del context
    gc.collect()
    watcher.join(WAIT_S)

    assert ended(pid)
    assert held() == before
    assert losses.texts == []


def test_closing_does_not_wait_for_a_run_that_hangs(engine: ProcessEngine) -> None:
    """The process is asked, and then ended."""
    context = engine.create_context()
    errors, join = under_way(1, lambda: value(context, scripts.HANGS))
    pid = pid_of("scripted")
    engine.close()
    join()

    assert ended(pid)
    assert [type(error) for error in errors] in ([EngineLostError], [])


@pytest.mark.parametrize("busy", [False, True])
def test_the_process_ends_with_its_parent(tmp_path: Path, busy: bool) -> None:
    """Even if the parent is killed; while the engine is opened (busy), and later."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    script = (
        "import functools, pathlib, signal, sys\n"
        "pipe = pathlib.Path(sys.argv[1]); sys.path[:0] = sys.argv[2:]\n"
        "import process_engines as scripts\n"
        "from engines.process import open_in_process\n"
    )
    if busy:
        script += "open_in_process(functools.partial(scripts.stall, pipe), name='m')\n"
    else:
        script += (
            "engine = open_in_process(scripts.numbered, name='m')\n"
            "pipe.write_text(engine.backend)\n"
            "signal.pause()\n"
        )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, pipe, str(Path(__file__).parent)]
    )
    pid = int(pipe.read_text())
    parent.kill()
    parent.wait()

    assert ended(pid)


def test_signals_for_all_are_left_to_the_parent(engine: ProcessEngine) -> None:
    """SIGINT and SIGTERM, as a terminal or a service sends them, do not end it."""
    context = engine.create_context()

    assert value(context, scripts.SIGNALLED) == [scripts.SIGNALLED]
    assert value(context, 7) == [7]
    assert os.getpgid(pid_of("scripted")) != os.getpgid(0)


# -- what it says ---------------------------------------------------------------------


def test_its_log_is_part_of_this_log(caplog: pytest.LogCaptureFixture) -> None:
    """Names, levels, texts, tracebacks and warnings arrive as if logged here."""
    caplog.set_level(logging.INFO)
    caplog.set_level(logging.DEBUG, "process_engines.quiet")

    open_in_process(scripts.talkative, name="m").close()
    records = [r for r in caplog.records if r.name.startswith(("process_", "py."))]

    assert [(r.name, r.levelname) for r in records] == [
        ("process_engines.talk", "WARNING"),
        ("process_engines.quiet", "DEBUG"),
        ("process_engines.talk", "INFO"),
        ("process_engines.talk", "ERROR"),
        ("process_engines.talk", "ERROR"),
        ("py.warnings", "WARNING"),
    ]
    assert records[0].getMessage() == "3 of these"
    assert len(records[2].getMessage()) == 100_000
    trace = logging.Formatter().formatException(records[4].exc_info or (None,) * 3)
    assert 'raise ValueError("inside")' in trace
    assert "mind the gap" in records[5].getMessage()
    assert records[0].process != os.getpid()


def test_what_it_prints_is_no_output_of_ours(
    engine: ProcessEngine, capfd: pytest.CaptureFixture[str]
) -> None:
    """Libraries may print; it goes to standard error and disturbs nothing."""
    opened = open_in_process(Scripted, name="m")
    assert value(opened.create_context(), scripts.PRINTS) == [scripts.PRINTS]
    opened.close()
    out, err = capfd.readouterr()

    assert out == ""
    assert "printed by native code\nprinted\n" in err


def test_fake_engines_open_in_processes() -> None:
    """The shipped engines' classes are recipes as they are."""
    options = FakeOptions(inputs=(scripts.X,), outputs=(scripts.Y,))
    engine = open_in_process(partial(FakeEngine, options), name="fake")

    assert engine.run({"x": np.arange(3)})["y"].tolist() == [0, 1, 2]
    engine.close()
