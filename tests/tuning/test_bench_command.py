"""The command `batcher bench`: what its flags may be, what it says, how it exits."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from batcher.cli import app
from batcher.errors import ConfigError
from batcher.tuning.arrivals import Constant, read_trace
from batcher.tuning.bench import run
from batcher.tuning.bodies import body_from_metadata, body_from_npz

from .bench_setup import Server, StartServer, closed, make_body

SHORT = ("--warmup", "0", "--seconds", "0.2", "--callers", "2")


def bench(target: str, *flags: str) -> Result:
    """The command, in this process."""
    return CliRunner().invoke(app, ["bench", target, "echo", *flags])


def refusal(*flags: str, target: str = "127.0.0.1:1") -> str:
    """The one line with which flags are refused, before a server is asked."""
    result = bench(target, *flags)

    assert result.exit_code == 2, result.output
    assert not isinstance(result.exception, ValueError | OverflowError)
    (line,) = result.stderr.splitlines()
    return line.removeprefix("batcher bench: ")


# -- flags ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--callers 0", "--callers is 0; it must be at least 1"),
        ("--callers -3", "--callers is -3; it must be at least 1"),
        ("--rows 0", "--rows is 0; it must be at least 1"),
        ("--rows 1 --rows -1", "--rows is -1; it must be at least 1"),
        ("--requests 0", "--requests is 0; it must be at least 1"),
        ("--connections 0", "--connections is 0; it must be at least 1"),
        ("--processes -1", "--processes is -1; it must be at least 1"),
        ("--rate 0", "--rate is 0; it must be above 0"),
        ("--rate -2.5", "--rate is -2.5; it must be above 0"),
        ("--rate nan", "--rate is nan; it must be above 0"),
        ("--rate inf", "--rate is inf; it must be above 0"),
        ("--rate 5 --cv -1", "--cv is -1; it must be at least 0"),
        ("--rate 5 --cv inf", "--cv is inf; it must be at least 0"),
        ("--seconds 0", "--seconds is 0; it must be at least 0.001"),
        ("--seconds nan", "--seconds is nan; it must be at least 0.001"),
        ("--warmup -1", "--warmup is -1; it must be at least 0"),
        ("--seed -1", "--seed is -1; it must be at least 0"),
        ("--verify 2", "--verify is 2; it must be from 0 to 1"),
        ("--deadline-ms 0", "--deadline-ms is 0; it must be from 0.001 to"),
        ("--deadline-ms -5", "--deadline-ms is -5; it must be from 0.001 to"),
        ("--deadline-ms 0.0001", "--deadline-ms is 0.0001; it must be from 0.001 to"),
        ("--deadline-ms inf", "--deadline-ms is inf; it must be from 0.001 to"),
        ("--deadline-ms nan", "--deadline-ms is nan; it must be from 0.001 to"),
    ],
)
def test_a_number_out_of_range_is_an_error_that_names_its_flag(
    flags: str, text: str
) -> None:
    """No number is replaced by a default, and none ends in a traceback."""
    assert refusal(*flags.split()).startswith(text)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--callers 4 --rate 5", "--callers is a closed loop"),
        ("--cv 2", "--cv is of --rate; a closed loop takes none"),
        ("--cv 1 --callers 4", "--cv is of --rate; a closed loop takes none"),
        ("--trace t --cv 0", "--cv is of --rate; a --trace takes none"),
        ("--trace t --rate 5", "give either --rate or --trace"),
        ("--npz f --rows 2", "leave out --rows and --shape"),
    ],
)
def test_flags_that_contradict_each_other_are_an_error(flags: str, text: str) -> None:
    """None of them is ignored in silence."""
    assert text in refusal(*flags.split())


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("nowhere", "give host:port"),
        ("unix:", "the path is missing"),
        ("unix://", "the path is missing"),
        ("127.0.0.1:0", "a port is from 1 to 65535"),
        ("127.0.0.1:73537", "a port is from 1 to 65535"),
    ],
)
def test_an_address_that_is_none_is_named_at_once(target: str, text: str) -> None:
    """It is not looked up, and no other port is taken for it."""
    assert refusal(target=target).startswith(f"target {target!r}: {text}")


def test_a_name_that_is_no_text_is_refused() -> None:
    """It could not be sent, and would end in a traceback."""
    result = CliRunner().invoke(app, ["bench", "127.0.0.1:1", "a\udcff"])

    assert result.exit_code == 2
    assert "'a\\udcff' cannot be a model's name" in result.stderr


def test_rows_that_no_input_takes_are_an_error(front: str) -> None:
    """Where every first size is fixed or given, --rows would change nothing."""
    shapes = {"ids": (1, 8), "x": (1, 4), "text": (1,)}

    with pytest.raises(ConfigError, match=r"rows is 3, but no input .* ids \[1, 8\]"):
        body_from_metadata(front, "echo", shapes=shapes, rows=3)
    same = body_from_metadata(front, "echo", shapes=shapes, rows=1)
    some = body_from_metadata(front, "echo", shapes={"ids": (3, 8)}, rows=3)

    assert same.label == "ids[1, 8] x[1, 4] text[1]"
    assert some.label == "ids[3, 8] x[3, 4] text[3]"


def test_a_shape_that_no_message_holds_is_an_error(front: str) -> None:
    """It is refused before memory is asked for."""
    for shape in ((10**9, 10**9), (0, 2**63)):
        with pytest.raises(ConfigError, match="a message has at most 2,147,483,647"):
            body_from_metadata(front, "echo", shapes={"ids": shape})


def test_a_file_that_is_no_npz_is_named(tmp_path: Path) -> None:
    """Whatever is wrong with it, one line says which file it is."""
    empty, array, damaged, half = (tmp_path / name for name in ("e", "a", "d", "h"))
    empty.write_bytes(b"")
    np.save(array, np.zeros(3))
    damaged.write_bytes(b"PK\3\4" + bytes(100))
    with zipfile.ZipFile(half, "w") as archive:
        archive.writestr("x.npy", b"\x93NUMPY\1\0")

    for path in (empty, tmp_path / "a.npy", damaged, half, tmp_path / "none"):
        with pytest.raises(ConfigError, match=f"body {path}: no .npz file"):
            body_from_npz("m", path)


@pytest.mark.parametrize("line", ["1e300", "1e18 0", "0 99999999999999999999"])
def test_a_trace_with_numbers_out_of_range_is_named(tmp_path: Path, line: str) -> None:
    """A number that is too large is a wrong line like others."""
    path = tmp_path / "trace"
    path.write_text(f"0\n{line}\n")

    with pytest.raises(ConfigError, match="line 2"):
        read_trace(path)


def test_a_body_of_a_trace_that_is_not_there_is_named(tmp_path: Path) -> None:
    """The error names the number that is wrong, and not another one."""
    path = tmp_path / "trace"
    path.write_text("2 0\n2 -1\n")

    with pytest.raises(ConfigError, match="names body -1, but there are 1 bodies"):
        closed("127.0.0.1:1", callers=None, arrivals=read_trace(path))


# -- what is said ---------------------------------------------------------------------


def test_the_report_says_what_was_sent(front: str) -> None:
    """The shapes are in the text and in JSON; those made up are warned of."""
    shown = bench(front, *SHORT, "--rows", "1", "--rows", "2", "--shape", "ids:1,7")
    found = json.loads(bench(front, *SHORT, "--json").stdout)

    assert "Body 0" in shown.stdout
    assert "ids[1, 7] x[1, 4] text[1]" in shown.stdout
    assert "ids[1, 7] x[2, 4] text[2]" in shown.stdout
    assert "nobody said" not in shown.stdout
    assert found["bodies"] == ["ids[1, 1] x[1, 4] text[1]"]
    assert [w for w in found["warnings"] if "nobody said how large" in w] == [
        "nobody said how large the inputs ids are: their axes of any size were sent "
        "with size 1; give --shape what real requests have"
    ]


def test_many_bodies_are_cut_short_in_the_text(
    front: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """JSON has them all."""
    from rich.console import Console

    bodies = tuple(replace(make_body(), label=f"[b]{i}") for i in range(11))
    report = run(closed(front, bodies=bodies))
    report.render(Console(width=100))
    text = capsys.readouterr().out

    assert "[b]7" in text
    assert "[b]8" not in text
    assert "and 3 more" in text
    assert len(report.bodies) == 11


def test_a_server_whose_error_looks_like_markup_is_shown(front: str) -> None:
    """The texts of others are not taken for the report's own markup."""
    from rich.console import Console

    report = replace(run(closed(front)), models_note="[/x]", target="unix:/tmp/[a]/s")
    console = Console(width=100)
    with console.capture() as captured:
        report.render(console)
    text = captured.get()

    assert "not available ([/x])" in text
    assert "unix:/tmp/[a]/s" in text


def test_a_run_that_ends_before_its_requests_says_so(front: str) -> None:
    """The time may be over first: fewer were measured than were asked for."""
    report = run(
        closed(front, bodies=(make_body(sleep_ms=20),), requests=900, measure_s=0.2)
    )

    assert any("of the 900 requests asked for" in w for w in report.warnings)


def test_a_trace_that_is_cut_short_says_so(front: str, tmp_path: Path) -> None:
    """The trace goes on after the time that was asked for."""
    path = tmp_path / "trace"
    path.write_text("0\n0.1\n9\n")
    trace = read_trace(path)
    changes = {"callers": None, "arrivals": trace, "requests": None}
    cut = run(closed(front, **changes, measure_s=0.2))
    all_of_it = run(
        closed(front, callers=None, arrivals=Constant(50), requests=None, measure_s=0.2)
    )

    text = "2 of the trace's 3 arrivals were sent: the time was over (--seconds)"
    assert text in cut.warnings
    assert not any("were sent" in w for w in all_of_it.warnings)


# -- how it exits ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("good", "bad", "passed", "text"),
    [
        (1.0, 0.0, True, ""),
        (3.0, 1.0, True, ""),
        (1.0, 9.0, False, "of 400 requests failed: the figures are of the few"),
        (0.0, 1.0, False, "no request succeeded"),
    ],
)
def test_a_run_in_which_most_failed_is_not_passed(
    front: str, good: float, bad: float, passed: bool, text: str
) -> None:
    """It is when nothing was answered, or when more than half failed."""
    bodies = [make_body(weight=good)] if good else []
    bodies += [make_body(weight=bad, fail=8)] if bad else []
    report = run(closed(front, bodies=tuple(bodies), requests=400, allow_errors=True))

    assert report.passed is passed
    assert any(text in warning for warning in report.warnings) is bool(text)


def test_wrong_answers_are_not_passed(front: str) -> None:
    """However few they are."""
    bodies = (make_body(flip_every=10),)
    report = run(closed(front, bodies=bodies, verify_fraction=1.0))

    assert not report.passed


def test_the_exit_code_says_whether_the_figures_are_worth_something(
    front: str, start_server: StartServer, tmp_path: Path
) -> None:
    """0 for a run, 1 when most failed, 2 when there was none; help says so."""
    server: Server = start_server()
    np.savez(tmp_path / "x.npz", x=np.zeros((1, 4), np.float32))
    body = ["--npz", str(tmp_path / "x.npz")]
    well = bench(front, *SHORT, *body)
    late = bench(
        server.target,
        *("--rate", "2000", "--seconds", "0.2", "--warmup", "0", *body),
        *("--deadline-ms", "0.001", "--allow-errors"),
    )
    none = CliRunner().invoke(app, ["bench", front, "other", *SHORT, *body])
    shown = CliRunner().invoke(app, ["bench", "--help"], terminal_width=200)

    assert well.exit_code == 0, well.output
    assert late.exit_code == 1, late.output
    assert none.exit_code == 2, none.output
    assert "more than half of them failed" in " ".join(shown.stdout.split())
