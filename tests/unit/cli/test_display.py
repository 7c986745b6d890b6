"""What a run shows: live, in plain lines, or nothing."""

import io
import json
from typing import Any

import pytest
from rich.console import Console

from solera.runs import loop
from solera.runs.config import load_config
from solera.runs.display import (
    IN_THE_CLEAR,
    WARNINGS_A_ROUND,
    Display,
    LiveDisplay,
    PlainDisplay,
    QuietDisplay,
    choose_display,
)
from solera.runs.record import RoundRecord
from solera.runs.words import human_bytes, human_time

FACTS = {
    "name": "toy", "method": "feddf", "rounds": 3, "start_round": 0, "clients": 8, "cohort": 4,
    "replies": "individual", "engine": "processes", "workers": 2, "out": "runs/toy",
}  # fmt: skip


def record(t: int, **more: Any) -> RoundRecord:
    line = {
        "round": t,
        "models": {"lenet5": {"accuracy": 0.5 + t / 10, "loss": 1.0}, "mlp": {"accuracy": 0.25, "loss": 2.0}},
        "ensembles": {"teachers": {"accuracy": 0.75, "loss": 0.5}},
        "personal": {"mean": 0.875, "std": 0.1, "worst_decile": 0.5, "clients": 8},
        "bytes": {"down": {"a": 1500, "b": 500}, "up": {"a": 1_000_000}},
        "seconds": {"total": 2.0},
        "failures": [],
        **more,
    }
    return RoundRecord.from_line(json.dumps(line))


SUMMARY = {
    "rounds": 3, "seconds": 75.0, "digest": "0123456789abcdef" * 4, "out": "runs/toy", "failures": {"c01": 2},
    "models": {"lenet5": {"accuracy": 0.7, "loss": 1.0, "best_accuracy": 0.8, "best_round": 1}},
    "ensembles": {"teachers": {"accuracy": 0.9, "loss": 1.0, "best_accuracy": 0.9, "best_round": 2}},
}  # fmt: skip


def drive(display: Display, rounds: int = 3, **more: Any) -> None:
    display.begin(FACTS, [])
    for t in range(rounds):
        for name in ("clients", "server", "evaluate", "commit"):
            display.phase(t, name)
            display.progress("local_update", 2, 4)
        display.saved(record(t, **more))
    display.end(SUMMARY)


def test_sums_in_the_clear_are_told_once_at_the_start():
    """Of a method that needs only means of replies: nothing hides the single ones from the server."""
    told = "  replies are summed in the clear: the server decodes each one before it adds it up"
    for replies, lines in (("means", [told]), ("individual", [])):
        file = io.StringIO()
        PlainDisplay(file=file).begin(FACTS | {"replies": replies}, [])
        assert file.getvalue().splitlines()[1:] == lines


@pytest.mark.parametrize(("method", "times"), [("fedavg", 1), ("local", 0)])
def test_a_run_says_it_once(method, times, tmp_path):
    file = io.StringIO()
    config = load_config(
        "toy",
        [f"method.name={method}", "run.rounds=2", "data.train_size=200", "data.test_size=50", "engine.name=inprocess",
         "method.local.epochs=0", "data.client_test=0.2", "public.size=20"],
    )  # fmt: skip
    loop.run(config, tmp_path / "run", callbacks=[PlainDisplay(file=file)])
    assert file.getvalue().count(IN_THE_CLEAR) == times


def test_plain_lines():
    file = io.StringIO()
    drive(PlainDisplay(file=file))
    lines = file.getvalue().splitlines()
    assert lines[0] == "toy: feddf, 3 rounds, 4 of 8 clients a round, engine processes x 2"
    assert lines[1] == (
        "[1/3]  lenet5 50.0%  mlp 25.0%  ensemble teachers 75.0%  own models 87.5%  2.0 kB down, 1.0 MB up  2.0 s"
    )
    assert lines[4].startswith("3 rounds in 1 min 15 s, digest 0123456789abcdef")
    assert lines[5] == "  lenet5: 70.0%, best 80.0% at 2/3"
    assert lines[-1] == "run directory: runs/toy"


def test_a_round_that_was_not_evaluated_still_has_its_line():
    file = io.StringIO()
    drive(PlainDisplay(file=file), models={}, ensembles={}, personal={})
    assert "[2/3]  2.0 kB down, 1.0 MB up  2.0 s" in file.getvalue()


def test_quiet_lines_have_only_the_outcome():
    file = io.StringIO()
    drive(PlainDisplay(every_round=False, file=file))
    assert file.getvalue().startswith("3 rounds in")


def test_json_leaves_stdout_alone(capsys):
    display = QuietDisplay()
    display.warn("c01 dropped")
    drive(display)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "warning: c01 dropped\n"


def test_warnings_are_said_once_and_not_endlessly():
    file = io.StringIO()
    display = QuietDisplay(file)
    for i in range(20):
        display.warn(f"c{i:02d} dropped")
        display.warn(f"c{i:02d} dropped")
    display.saved(record(0))
    lines = file.getvalue().splitlines()
    assert len(lines) == WARNINGS_A_ROUND + 1
    assert lines[-1] == f"warning: and {20 - WARNINGS_A_ROUND} more"
    display.warn("c00 dropped")  # another round: news again
    assert file.getvalue().endswith("warning: c00 dropped\n")


@pytest.mark.parametrize("width", [1, 8, 20, 40, 80, 300])
def test_the_live_display_fits_every_terminal(width):
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, height=10, legacy_windows=False)
    display = LiveDisplay(console)
    drive(display)
    plain = Console(file=io.StringIO(), width=width, color_system=None)
    plain.print(display.render())
    assert isinstance(plain.file, io.StringIO)
    assert all(len(line) <= width for line in plain.file.getvalue().splitlines())


def test_the_live_display_shows_what_is_going_on():
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    display = LiveDisplay(console)
    display.begin(FACTS, [])
    display.phase(0, "clients")
    display.saved(record(0, failures=[{"client": "c01", "task": "t", "reason": "died"}]))
    display.phase(1, "clients")
    display.progress("local_update", 2, 4)
    plain = Console(file=io.StringIO(), width=100, color_system=None)
    plain.print(display.render())
    display.end(None)
    assert isinstance(plain.file, io.StringIO)
    seen = plain.file.getvalue()
    for piece in (
        "round 2/3",
        "left",
        "clients train",
        "2/4 answered",
        "2.0 kB down",
        "1.0 MB up",
        "1 replies dropped",
    ):
        assert piece in seen
    for piece in ("lenet5", "50.0%", "ensemble teachers", "75.0%", "own models"):
        assert piece in seen


def test_many_models_do_not_fill_the_screen():
    many = {f"m{i}": {"accuracy": 0.5, "loss": 1.0} for i in range(100)}
    display = LiveDisplay(Console(file=io.StringIO(), force_terminal=True, width=100))
    drive(display, models=many)
    plain = Console(file=io.StringIO(), width=100, color_system=None)
    plain.print(display.render())
    assert isinstance(plain.file, io.StringIO)
    assert len(plain.file.getvalue().splitlines()) < 25


def test_the_live_display_ends_when_the_run_fails():
    display = LiveDisplay(Console(file=io.StringIO(), force_terminal=True))

    display.begin(FACTS, [])
    assert display.live is not None
    display.end(None)
    assert display.live is None


def test_which_display():
    assert type(choose_display(json=True)) is QuietDisplay
    assert type(choose_display(quiet=True)) is PlainDisplay
    assert type(choose_display()) is PlainDisplay  # pytest's stdout is no terminal


@pytest.mark.parametrize(
    ("n", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (99_940, "99.9 kB"), (123_456, "123 kB"), (999_900, "1.0 MB"),
     (5e9, "5.0 GB"), (7e15, "7000.0 TB")],
)  # fmt: skip
def test_bytes_in_words(n, text):
    assert human_bytes(n) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0.0 s"), (9.96, "10 s"), (59.6, "1 min 0 s"), (75, "1 min 15 s"), (3725, "1 h 2 min")]
)
def test_time_in_words(seconds, text):
    assert human_time(seconds) == text
