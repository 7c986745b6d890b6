"""A run killed anywhere, any number of times, resumes to the same bits."""

import dataclasses
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

import pytest
import torch

import fresh
import solera
from run_directories import lines_of
from solera.cli.info_commands import SELF_TEST
from solera.core.errors import ConfigError, RunError
from solera.core.federation import FederationConfig
from solera.engines import ClientStates
from solera.method import find_method
from solera.runs import loop
from solera.runs.config import EngineConfig, RunConfig, load_config
from solera.runs.directory import RunDirectory
from solera.runs.loop import simulate
from solera.runs.record import read_records
from solera.testing import run_toy, small, toy_for

STATEFUL = "scaffold"


class Death(BaseException):
    """The process ends here, as far as the run can tell."""


def make(name: str):
    return small(find_method(name)())


def run_few(name: str, out: pathlib.Path, rounds: int):
    """A toy run in which a quarter of the clients takes part: what the server keeps of the others does not change."""
    method, few = make(name), FederationConfig(fraction=0.25)
    return simulate(
        toy_for(method), method, out, RunConfig(rounds=rounds), few, EngineConfig(name="inprocess"), resume=True
    )  # fmt: skip


def shared_files(out: pathlib.Path) -> list[pathlib.Path]:
    """Files that are no checkpoints any more, but hold tensors of one; oldest first."""
    return sorted((out / "checkpoints" / "older").glob("*.safetensors"))


# FedAMP's and FedFomo's servers keep a model of every client, so their checkpoints refer to older files.
@pytest.mark.parametrize(
    ("name", "run", "rounds", "least"),
    [
        (STATEFUL, "toy", 2, 10),
        pytest.param("local", "toy", 2, 10, marks=pytest.mark.rest),
        pytest.param("feddf", "toy", 2, 10, marks=pytest.mark.rest),
        ("fedamp", "few", 5, 25),
        pytest.param("fedfomo", "few", 5, 35, marks=pytest.mark.rest),
    ],
)
def test_death_at_every_file_operation(name, run, rounds, least, tmp_path, monkeypatch):
    """Before and after each rename, for every rename of the run: all of them end in the same digest."""

    def go(out):
        return run_toy(make(name), out, rounds=rounds) if run == "toy" else run_few(name, out, rounds)

    expected = go(tmp_path / "whole").digest
    assert bool(shared_files(tmp_path / "whole")) == (run == "few")
    replace, seen = pathlib.Path.replace, 0

    def dying(self, target):
        nonlocal seen
        seen += 1
        if seen == point and before:
            raise Death
        result = replace(self, target)
        if seen == point:
            raise Death
        return result

    monkeypatch.setattr(pathlib.Path, "replace", dying)
    points = 0
    for before in (True, False):
        point = 0
        while True:
            point, seen = point + 1, 0
            out = tmp_path / f"{before}{point}"
            try:
                go(out)
                break  # fewer renames than `point`: every one has been tried
            except Death:
                points += 1
            seen = -(10**9)
            assert go(out).digest == expected, f"died at rename {point}"
            assert [m["round"] for m in lines_of(out)] == list(range(rounds)), f"died at rename {point}"
    assert points >= least


def test_death_at_every_removal_of_a_file_that_was_shared(tmp_path, monkeypatch):
    """Files are removed when no kept checkpoint needs them, not before: whoever dies in between loses nothing."""
    name, rounds = "fedamp", 14
    expected = run_few(name, tmp_path / "whole", rounds).digest
    unlink, seen = pathlib.Path.unlink, 0

    def dying(self, missing_ok=False):
        nonlocal seen
        if self.parent.name not in ("checkpoints", "older"):
            return unlink(self, missing_ok=missing_ok)
        seen += 1
        if seen == point and before:
            raise Death
        unlink(self, missing_ok=missing_ok)
        if seen == point:
            raise Death
        return None

    monkeypatch.setattr(pathlib.Path, "unlink", dying)
    points = 0
    for before in (True, False):
        point = 0
        while True:
            point, seen = point + 1, 0
            out = tmp_path / f"{before}{point}"
            try:
                run_few(name, out, rounds)
                break
            except Death:
                points += 1
            seen = -(10**9)
            home = RunDirectory(out, solera.__version__, resume=True)
            damaged = home.latest(find_method(name).State)[-1]
            home.close()
            assert damaged == [], f"died at removal {point}"
            assert run_few(name, out, rounds).digest == expected, f"died at removal {point}"
    assert points >= 8


SCRIPT = """
import logging, pathlib, sys
import torch
from solera.cli.info_commands import SELF_TEST
from solera.runs.config import EngineConfig, RunConfig, load_config
from solera.core.federation import FederationConfig
from solera.method import find_method
from solera.runs import loop
from solera.runs.loop import simulate
from solera.testing import small, toy_for
logging.disable(logging.CRITICAL)
def blurred(batch, rng):
    return batch + 0.3 * torch.randn(batch.shape, generator=rng)
name, out, engine, rounds, fraction, augment = sys.argv[1:]
method = small(find_method(name)())
print("go", flush=True)
done = simulate(
    toy_for(method, augment=[blurred] if augment else []), method, pathlib.Path(out), RunConfig(rounds=int(rounds)),
    FederationConfig(fraction=float(fraction)), EngineConfig(name=engine, workers=2), resume=True,
)
print(done.digest, flush=True)
"""


def start(name, out, engine, rounds=8, augment=False) -> fresh.Process:
    fraction = 0.25 if name in ("fedamp", "fedfomo") else 0.75  # a few: checkpoints that refer to older files
    process = fresh.Process("-c", SCRIPT, name, out, engine, rounds, fraction, "yes" if augment else "")
    assert process.stdout.readline() == b"go\n", process.stderr.read().decode()
    return process


@pytest.mark.parametrize(
    ("name", "engine", "kills", "augment"),
    [
        ("scaffold", "inprocess", 3, False),
        ("scaffold", "processes", 3, True),
        ("local", "processes", 3, False),
        ("feddf", "processes", 3, False),
        ("fedfomo", "inprocess", 3, True),
        pytest.param("fedamp", "inprocess", 50, False, marks=pytest.mark.slow),
        pytest.param("fedfomo", "processes", 50, False, marks=pytest.mark.slow),
        pytest.param("scaffold", "inprocess", 50, False, marks=pytest.mark.slow),
        pytest.param("local", "processes", 50, False, marks=pytest.mark.slow),
        pytest.param("feddf", "processes", 50, False, marks=pytest.mark.slow),
        pytest.param("fedavgm", "threads", 50, False, marks=pytest.mark.slow),
    ],
)
def test_kill_nine_at_random_moments(name, engine, kills, augment, tmp_path):
    whole = start(name, tmp_path / "whole", engine, augment=augment)
    began = time.monotonic()
    expected = whole.communicate()[0].strip()
    length = time.monotonic() - began
    moments, done, run_number = random.Random(f"{name}{engine}"), 0, 0
    while done < kills:
        out = tmp_path / f"run{run_number}"
        run_number += 1
        digest = ""
        while not digest:
            process = start(name, out, engine, augment=augment)
            if done < kills:
                try:
                    process.wait(moments.uniform(0, length))
                except subprocess.TimeoutExpired:
                    process.send_signal(signal.SIGKILL)
                    process.communicate()
                    done += 1
                    continue
            digest = process.communicate()[0].strip()
        assert digest == expected, f"after {done} kills"


@pytest.mark.parametrize("damage", ["truncate", "zeros", "delete", "renamed"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(damage, tmp_path):
    method = make(STATEFUL)
    expected = run_toy(method, tmp_path / "whole", rounds=4).digest
    run_toy(method, tmp_path / "hurt", rounds=3)
    newest = sorted((tmp_path / "hurt" / "checkpoints").glob("*.safetensors"))[-1]
    content = newest.read_bytes()
    if damage == "truncate":
        newest.write_bytes(content[: len(content) // 2])
    elif damage == "zeros":
        newest.write_bytes(b"\0" * len(content))
    elif damage == "delete":
        newest.unlink()
    else:
        newest.rename(newest.with_name("000002.safetensors"))
    assert run_toy(method, tmp_path / "hurt", rounds=4).digest == expected


def test_truncation_at_any_offset_is_noticed(tmp_path):
    method = make(STATEFUL)
    run_toy(method, tmp_path, rounds=3)
    newest = sorted((tmp_path / "checkpoints").glob("*.safetensors"))[-1]
    content = newest.read_bytes()
    for cut in torch.linspace(0, len(content) - 1, 200).int().tolist():
        newest.write_bytes(content[:cut])
        home = RunDirectory(tmp_path, solera.__version__, resume=True)
        rounds, _, _, damaged = home.latest(method.State)
        home.close()
        assert rounds == 2, f"cut at {cut}"
        assert "checkpoint of round 2 is damaged" in damaged[0]


@pytest.mark.parametrize("name", ["fedamp", "fedfomo"])
def test_a_shared_file_cut_anywhere_is_noticed_and_named(name, tmp_path):
    """One checkpoint needs it, never both: the other one serves, and the run ends in the same bits."""
    expected = run_few(name, tmp_path / "whole", 6).digest
    run_few(name, tmp_path / "hurt", 5)
    newest = sorted((tmp_path / "hurt" / "checkpoints").glob("*.safetensors"))[-1]
    needed = next(p for p in shared_files(tmp_path / "hurt") if p.name.encode() in newest.read_bytes())
    content = needed.read_bytes()
    for cut in torch.linspace(0, len(content) - 1, 100).int().tolist():
        needed.write_bytes(content[:cut])
        home = RunDirectory(tmp_path / "hurt", solera.__version__, resume=True)
        rounds, _, _, damaged = home.latest(find_method(name).State)
        home.close()
        assert rounds == 4, f"cut at {cut}"
        assert len(damaged) == 1
        assert f"{needed} is damaged" in damaged[0]
    assert run_few(name, tmp_path / "hurt", 6).digest == expected


@pytest.mark.parametrize("name", ["fedamp", "fedfomo"])
def test_a_damaged_newest_checkpoint_falls_back_to_one_with_shared_files(name, tmp_path):
    expected = run_few(name, tmp_path / "whole", 6).digest
    run_few(name, tmp_path / "hurt", 5)
    newest = sorted((tmp_path / "hurt" / "checkpoints").glob("*.safetensors"))[-1]
    newest.write_bytes(newest.read_bytes()[:-1])
    home = RunDirectory(tmp_path / "hurt", solera.__version__, resume=True)
    rounds, _, _, damaged = home.latest(find_method(name).State)
    home.close()
    assert (rounds, len(damaged)) == (4, 1)
    assert run_few(name, tmp_path / "hurt", 6).digest == expected


def test_all_checkpoints_damaged_means_from_the_start_and_the_same_end(tmp_path):
    method = make(STATEFUL)
    expected = run_toy(method, tmp_path / "whole", rounds=3).digest
    run_toy(method, tmp_path / "hurt", rounds=2)
    for f in (tmp_path / "hurt" / "checkpoints").glob("*.safetensors"):
        f.write_bytes(b"")
    assert run_toy(method, tmp_path / "hurt", rounds=3).digest == expected


def test_without_versions_of_client_state_a_resumed_run_would_differ(tmp_path, monkeypatch):
    """The control: loading the newest state, whatever the call names, gives other bits. So the tests above can fail."""
    method = make(STATEFUL)
    expected = run_toy(method, tmp_path / "whole", rounds=3).digest
    load = ClientStates.load
    newest_of = ClientStates.versions
    monkeypatch.setattr(ClientStates, "load", lambda self, k, _: load(self, k, (newest_of(self, k) or [None])[-1]))
    run_toy(method, tmp_path / "hurt", rounds=3)
    newest = sorted((tmp_path / "hurt" / "checkpoints").glob("*.safetensors"))[-1]
    newest.unlink()
    assert run_toy(method, tmp_path / "hurt", rounds=3).digest != expected


def ledgers_of(out: pathlib.Path) -> list[dict]:
    """Those of the two checkpoints, oldest first."""
    home = RunDirectory(out, solera.__version__, resume=True)
    home.rewind(10**6)
    home.close()
    return home.ledgers()


def flip(path: pathlib.Path, other: pathlib.Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def swap(path: pathlib.Path, other: pathlib.Path) -> None:
    mine, others = path.read_bytes(), other.read_bytes()
    path.write_bytes(others)
    other.write_bytes(mine)


DAMAGES = {
    "deleted": lambda path, other: path.unlink(),
    "flipped": flip,
    "cut": lambda path, other: path.write_bytes(path.read_bytes()[:-1]),
    "swapped": swap,
    "renamed": lambda path, other: path.rename(path.with_name("000000009999" + path.name[12:])),
    "another's": lambda path, other: path.write_bytes(other.read_bytes()),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["scaffold", "local"])
def test_damaged_client_state_changes_no_bit_without_a_word(name, damage, tmp_path):
    """One that only the newest checkpoint needs costs that checkpoint; one that both need stops the run by its name."""
    expected = run_toy(make(name), tmp_path / "whole", rounds=4).digest
    run_toy(make(name), tmp_path / "hurt", rounds=3)
    before, after = ledgers_of(tmp_path / "hurt")
    states = ClientStates(tmp_path / "hurt" / "clients")
    moved = [k for k in after if before.get(k) != after[k]]
    resting = [k for k in after if before.get(k) == after[k]]
    assert len(moved) > 1
    assert resting
    # Two that moved: whatever befalls them, the checkpoint before needs neither.
    DAMAGES[damage](states.path(moved[0], after[moved[0]]), states.path(moved[1], after[moved[1]]))
    assert run_toy(make(name), tmp_path / "hurt", rounds=4).digest == expected

    run_toy(make(name), tmp_path / "lost", rounds=3)
    states = ClientStates(tmp_path / "lost" / "clients")
    path = states.path(resting[0], after[resting[0]])
    DAMAGES[damage](path, states.path(moved[0], after[moved[0]]))
    with pytest.raises(RunError, match=f"cannot be continued: .*{path}|cannot be continued: .*{moved[0]}"):
        run_toy(make(name), tmp_path / "lost", rounds=4)


def test_client_state_that_is_damaged_while_the_run_goes_on_stops_it_by_its_name(tmp_path, monkeypatch):
    method, save = make(STATEFUL), ClientStates.save

    def damaging(self, client, *rest):
        version = save(self, client, *rest)
        flip(self.path(client, version), self.root)
        return version

    with monkeypatch.context() as m:
        m.setattr(ClientStates, "save", damaging)
        with pytest.raises(RunError, match=r"round 1: the state of c\d+ is damaged: .*clients/c\d+/0000000000"):
            run_toy(method, tmp_path, rounds=3)


@pytest.mark.parametrize("engine", ["inprocess", "threads", "processes"])
def test_a_full_disk_for_client_state_stops_the_run_and_blames_no_client(engine, tmp_path, monkeypatch):
    method = make(STATEFUL)
    expected = run_toy(method, tmp_path / "whole", rounds=4).digest
    run_toy(method, tmp_path / "full", rounds=2)
    write = pathlib.Path.write_bytes

    def full(self, content):
        if "clients" in self.parts and self.name.startswith("00000000300"):
            write(self, content[: len(content) // 2])
            raise OSError(28, "No space left on device")
        return write(self, content)

    with monkeypatch.context() as m:
        m.setattr(pathlib.Path, "write_bytes", full)
        with pytest.raises(RunError, match=r"round 3: the state of c\d+ cannot be stored in .*No space left.*resume"):
            run_toy(method, tmp_path / "full", engine, rounds=4)
    assert [m["failures"] for m in lines_of(tmp_path / "full")] == [[], [], []]
    assert not list((tmp_path / "full" / "clients").rglob("*.draft"))
    assert run_toy(method, tmp_path / "full", engine, rounds=4).digest == expected


@pytest.mark.skipif(sys.platform != "linux", reason="asks the system which file is meant")
def test_a_disk_that_is_full_when_client_state_is_flushed_stops_the_run(tmp_path, monkeypatch):
    method, fsync = make(STATEFUL), os.fsync

    def full(fd):
        if "/clients/" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(28, "No space left on device")
        fsync(fd)

    with monkeypatch.context() as m:
        m.setattr(os, "fsync", full)
        with pytest.raises(RunError, match=r"the state of c\d+ cannot be stored in .*No space left on device"):
            run_toy(method, tmp_path, rounds=2)
    assert run_toy(method, tmp_path, rounds=2).digest


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux' device that is always full")
def test_a_full_temporary_directory_stops_the_run_and_names_the_setting(tmp_path, monkeypatch):
    method = make("feddf")
    method = dataclasses.replace(method, fusion=dataclasses.replace(method.fusion, cache_on_disk=True))
    expected = run_toy(method, tmp_path / "whole", rounds=2).digest
    with monkeypatch.context() as m:
        m.setattr(tempfile, "TemporaryFile", lambda: open("/dev/full", "w+b"))  # noqa: SIM115
        with pytest.raises(RunError, match=r"No space left .*set TMPDIR .*fusion\.cache_on_disk; .*resume") as caught:
            run_toy(method, tmp_path / "full", rounds=2)
    assert caught.value.exit_code == 4
    assert run_toy(method, tmp_path / "full", rounds=2).digest == expected


def test_client_state_that_no_checkpoint_needs_is_removed(tmp_path):
    method = make(STATEFUL)
    run_toy(method, tmp_path, rounds=9)
    named = [{(k, v) for k, v in ledger.items()} for ledger in ledgers_of(tmp_path)]
    states = ClientStates(tmp_path / "clients")
    there = {(k, v) for k in toy_for(method).roster for v in states.versions(k)}
    assert there >= named[0] | named[1]
    # Beside them, of each client: what it began its last round with.
    assert len(there) <= len(named[0] | named[1]) + len(toy_for(method).roster)


def test_metrics_have_one_line_a_round_after_a_crash(tmp_path):
    method = make("fedavg")
    run_toy(method, tmp_path, rounds=2)
    with open(tmp_path / "metrics.jsonl", "a") as f:
        f.write('{"round": 2, "models"')  # cut short
    run_toy(method, tmp_path, rounds=4)
    rounds = [json.loads(line)["round"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rounds == [0, 1, 2, 3]


@pytest.mark.parametrize("lost", [0, 2, 3])
def test_lost_lines_of_the_metrics_end_in_no_summary_that_counts_fewer_rounds(lost, tmp_path):
    method = make("fedavg")
    expected = run_toy(method, tmp_path / "whole", rounds=5).digest
    run_toy(method, tmp_path / "cut", rounds=4)
    metrics = tmp_path / "cut" / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:lost] + lines[lost + 1 :]))
    if lost == 3:  # the checkpoint before it does not need its line
        assert run_toy(method, tmp_path / "cut", rounds=5).digest == expected
        assert [line["round"] for line in lines_of(tmp_path / "cut")] == [0, 1, 2, 3, 4]
        assert json.loads((tmp_path / "cut" / "summary.json").read_text())["rounds"] == 5
        return
    before = (tmp_path / "cut" / "summary.json").read_bytes()
    with pytest.raises(RunError, match=rf"metrics\.jsonl has no valid line for round {lost}.*restore the file"):
        run_toy(method, tmp_path / "cut", rounds=5)
    assert (tmp_path / "cut" / "summary.json").read_bytes() == before


def test_an_event_that_lost_its_kind_is_a_damaged_line(tmp_path):
    method = make("fedavg")
    run_toy(method, tmp_path, rounds=3)
    metrics = tmp_path / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    lines[0]["events"] = [{"kinf": "collapsed"}]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(RunError, match=r"metrics\.jsonl has no valid line for round 0"):
        run_toy(method, tmp_path, rounds=4)


@pytest.mark.parametrize(("key", "value", "before"), [("engine.threads", 2, "unset"), ("data.test_size", 99, "50")])
def test_settings_that_change_results_may_not_change_when_a_run_goes_on(key, value, before, tmp_path):
    tables = SELF_TEST | {"engine": {"name": "inprocess"}}
    loop.run(load_config(tables), tmp_path)
    with pytest.raises(RunError, match=f"was started with {key} = {before}, not {value}: "):
        loop.run(load_config(tables, [f"{key}={value}", "run.rounds=9"]), tmp_path, resume=True)


def test_two_runs_cannot_share_a_directory(tmp_path):
    home = RunDirectory(tmp_path / "a", "0.1")
    with pytest.raises(RunError, match="in use by another run"):
        RunDirectory(tmp_path / "a", "0.1", resume=True)
    home.close()
    RunDirectory(tmp_path / "a", "0.1", resume=True).close()
    child = start("fedavg", tmp_path / "b", "inprocess", 200)
    while not (tmp_path / "b" / "metrics.jsonl").exists():
        time.sleep(0.01)
    with pytest.raises(RunError, match=f"in use by another run .process {child.pid}"):
        run_toy(make("fedavg"), tmp_path / "b")
    child.kill()
    child.communicate()


def test_a_directory_of_another_version_or_content_is_refused(tmp_path):
    run_toy(make("fedavg"), tmp_path / "a", rounds=1)
    method = make("fedavg")
    with pytest.raises(RunError, match="already holds a run; pass resume=True, or choose another directory as `out`"):
        simulate(toy_for(method), method, tmp_path / "a", RunConfig(rounds=1))
    (tmp_path / "a" / "run.json").write_text('{"format": 99, "solera": "9.9"}')
    with pytest.raises(RunError, match=r"format 99 by solera 9\.9.*pip install solera==9\.9"):
        run_toy(method, tmp_path / "a")
    (tmp_path / "a" / "run.json").write_text('{"format": 1, "solera": "0.1.0"}')
    with pytest.raises(RunError, match=r"format 1 by solera 0\.1\.0; this is .*format 2: continue it with that"):
        run_toy(method, tmp_path / "a")
    (tmp_path / "a" / "run.json").write_text("{")
    with pytest.raises(RunError, match="damaged"):
        run_toy(method, tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.tex").write_text("mine")
    with pytest.raises(RunError, match=r"not empty \(it has 'thesis\.tex'\)"):
        run_toy(method, tmp_path / "b")
    assert (tmp_path / "b" / "thesis.tex").read_text() == "mine"
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be used"):
        run_toy(method, tmp_path / "file")


def test_a_full_disk_leaves_the_last_checkpoint_intact(tmp_path, monkeypatch):
    method = make(STATEFUL)
    expected = run_toy(method, tmp_path / "whole", rounds=4).digest
    run_toy(method, tmp_path / "full", rounds=2)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr("solera.runs.directory.os.fsync", full)
        with pytest.raises(RunError, match="No space left on device"):
            run_toy(method, tmp_path / "full", rounds=4)
    assert run_toy(method, tmp_path / "full", rounds=4).digest == expected


def test_sigterm_ends_soon_and_can_be_resumed(tmp_path):
    expected = start("scaffold", tmp_path / "whole", "processes", 30).communicate()[0].strip()
    process = start("scaffold", tmp_path / "cut", "processes", 30)
    while len(read_records(tmp_path / "cut", [])) < 2:
        time.sleep(0.01)
    began = time.monotonic()
    process.terminate()
    process.communicate()
    assert time.monotonic() - began < 5
    assert start("scaffold", tmp_path / "cut", "processes", 30).communicate()[0].strip() == expected


def test_a_run_without_clients_stops_with_a_name_and_can_be_resumed(tmp_path, monkeypatch):
    from solera.core.federation import QuorumNotMet
    from solera.engines.faulty import Faulty

    method = make("fedavg")
    run_toy(method, tmp_path / "gone", rounds=1)

    open_engine = EngineConfig.open
    with monkeypatch.context() as m:
        m.setattr(EngineConfig, "open", lambda *a: Faulty(open_engine(*a), lambda c: "drop"))
        with pytest.raises(QuorumNotMet, match="3 rounds in a row were void"):
            simulate(
                toy_for(method), method, tmp_path / "gone", RunConfig(rounds=9), FederationConfig(fraction=0.75),
                EngineConfig(name="inprocess"), resume=True,
            )  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "gone" / "metrics.jsonl").read_text().splitlines()]
    assert [e["kind"] for m in lines for e in m["events"]] == ["round_empty", "round_empty"]
    result = run_toy(method, tmp_path / "gone", rounds=5)  # the clients are back
    assert [m["round"] for m in lines_of(tmp_path / "gone")] == [0, 1, 2, 3, 4]
    assert result.summary["finished"]


def test_another_methods_checkpoint_is_refused_and_nothing_is_lost(tmp_path):
    whole = run_toy(make("fedavg"), tmp_path / "run", rounds=2).digest

    def files():
        return {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file() and p.name != ".lock"}

    before = files()
    with pytest.raises(RunError, match=r"started with method\.name = fedavg, not scaffold: .*choose another"):
        run_toy(make("scaffold"), tmp_path / "run", rounds=3)
    with pytest.raises(RunError, match=r"started with run\.seed = 0, not 1"):
        run_toy(make("fedavg"), tmp_path / "run", rounds=3, seed=1)
    with pytest.raises(RunError, match=r"started with clients\.count = 8, not 6"):
        run_toy(make("fedavg"), tmp_path / "run", rounds=3, clients=6)
    assert files() == before
    assert run_toy(make("fedavg"), tmp_path / "run", rounds=2).digest == whole


def test_being_refused_does_not_take_the_lock_from_the_run_that_has_it(tmp_path):
    home = RunDirectory(tmp_path / "a", "0.1")
    with pytest.raises(RunError, match="in use by another run"):
        RunDirectory(tmp_path / "a", "0.1", resume=True)
    other = start("fedavg", tmp_path / "a", "inprocess", 1)
    _, said = other.communicate()
    assert other.returncode != 0
    assert "in use by another run" in said
    home.close()


def test_bytes_that_are_no_text_are_dropped_from_the_metrics(tmp_path):
    run_toy(make("fedavg"), tmp_path, rounds=1)
    with open(tmp_path / "metrics.jsonl", "ab") as f:
        f.write(b"\xff\xfe\x00\n")
    run_toy(make("fedavg"), tmp_path, rounds=2)
    assert [m["round"] for m in lines_of(tmp_path)] == [0, 1]


@pytest.mark.parametrize("clients", [0, 3])
def test_measuring_personal_models_needs_no_quorum(tmp_path, clients):
    method = make("local")
    simulate(
        toy_for(method), method, tmp_path, RunConfig(rounds=1, eval_clients=clients),
        FederationConfig(min_replies=5), EngineConfig(name="inprocess"),
    )  # fmt: skip
    (metrics,) = lines_of(tmp_path)
    assert metrics["personal"]["clients"] == clients


def test_a_quorum_that_can_never_be_met_is_refused_at_once(tmp_path):
    method = make("fedavg")
    with pytest.raises(ConfigError, match=r"federation.min_replies = 5: a round asks 4 of 8 clients"):
        simulate(toy_for(method), method, tmp_path / "no", RunConfig(), FederationConfig(fraction=0.5, min_replies=5))
    assert not (tmp_path / "no").exists()


def test_a_void_round_leaves_every_client_as_it_was(tmp_path, monkeypatch):
    """SCAFFOLD's c is the mean of all c_k: it would not be, if those who answered in vain had moved on."""
    from solera.engines.faulty import Faulty

    method, open_engine, config = make(STATEFUL), EngineConfig.open, FederationConfig(fraction=1.0, min_replies=8)

    def round_one_lacks_one(call):
        return "drop" if call.step // 1000 == 1 and call.client == "c03" else None

    monkeypatch.setattr(EngineConfig, "open", lambda *a: Faulty(open_engine(*a), round_one_lacks_one))
    result = simulate(toy_for(method), method, tmp_path, RunConfig(rounds=2), config, EngineConfig(name="inprocess"))
    noted = [e["kind"] for m in lines_of(tmp_path) for e in m["events"]]
    assert [kind for kind in noted if kind != "variates"] == ["round_empty"]
    states = ClientStates(tmp_path / "clients")
    home = RunDirectory(tmp_path, solera.__version__, resume=True)
    ledger = home.latest(method.State)[2]
    home.close()
    assert {ledger[k].step // 1000 for k in toy_for(method).roster} == {0}
    for P, c in result.state.control.items():
        own = [states.load(k, ledger[k])["control"] for k, i in toy_for(method).roster.items() if i.architecture == P]
        for n, t in c.items():
            assert torch.allclose(t, torch.stack([c_k[n] for c_k in own]).mean(0), atol=1e-5)


def test_a_round_that_is_void_half_way_leaves_every_client_as_it_was(tmp_path, monkeypatch):
    """MNFL's clients have trained in the first exchange; in the second nobody answers."""
    from solera.engines.faulty import Faulty

    method, open_engine = make("mnfl"), EngineConfig.open
    expected = run_toy(method, tmp_path / "one", rounds=1).digest

    def nobody_in_the_second(call):
        return "drop" if call.step == 1001 else None

    monkeypatch.setattr(EngineConfig, "open", lambda *a: Faulty(open_engine(*a), nobody_in_the_second))
    void = run_toy(method, tmp_path / "two", rounds=2)
    assert [e["kind"] for m in lines_of(tmp_path / "two") for e in m["events"]].count("round_empty") == 1
    assert void.digest == expected


@pytest.mark.parametrize("newest", ["whole", "damaged"])
def test_client_state_of_both_checkpoints_stays_while_rounds_go_on_without_one(newest, tmp_path, monkeypatch):
    method, append = make(STATEFUL), RunDirectory.append

    def go(out):
        config = RunConfig(rounds=9, checkpoint_every=3)
        return simulate(toy_for(method), method, out, config, FederationConfig(fraction=0.75), resume=True)

    def dying(self, record):
        if record.round == 7:
            raise Death
        append(self, record)

    expected = go(tmp_path / "whole").digest
    with monkeypatch.context() as m:
        m.setattr(RunDirectory, "append", dying)
        with pytest.raises(Death):
            go(tmp_path / "hurt")
    kept = sorted((tmp_path / "hurt" / "checkpoints").glob("*.safetensors"))
    assert [p.name[:6] for p in kept] == ["000002", "000005"]
    if newest == "damaged":
        kept[-1].write_bytes(b"")
    assert go(tmp_path / "hurt").digest == expected


def test_all_client_state_since_the_last_checkpoint_is_flushed(tmp_path, monkeypatch):
    flushed: list[dict] = []
    monkeypatch.setattr(ClientStates, "flush", lambda self, ledger: flushed.append(dict(ledger)))
    method = make(STATEFUL)
    config = RunConfig(rounds=5, checkpoint_every=2)
    simulate(toy_for(method), method, tmp_path, config, FederationConfig(fraction=0.25), EngineConfig("inprocess"))
    rounds = [{v.step // 1000 for v in ledger.values()} for ledger in flushed]
    assert rounds == [{0, 1}, {2, 3}, {4}]  # of all rounds since the last, and of no other
    assert len(flushed[0]) > 2  # two a round: not those of the last round alone


def test_sigterm_while_a_reply_is_looked_at_does_not_cost_that_reply(tmp_path, monkeypatch):
    import solera.core.federation as module
    from solera.core.stopping import Interrupted

    method = make("fedavg")
    expected = run_toy(method, tmp_path / "whole", rounds=2).digest
    decode, seen = module.decode, 0

    def interrupted(message, *args):
        nonlocal seen
        seen += 1
        if seen == 6:  # the last of the first round
            monkeypatch.setattr("solera.core.wire._Reading.__call__", lambda *a: os.kill(os.getpid(), signal.SIGTERM))
        return decode(message, *args)

    with monkeypatch.context() as m:
        m.setattr(module, "decode", interrupted)
        with pytest.raises(Interrupted):
            run_toy(method, tmp_path / "cut", rounds=2)
    monkeypatch.undo()
    assert seen == 6
    assert run_toy(method, tmp_path / "cut", rounds=2).digest == expected


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (lambda: {"config": RunConfig(eval_every=0)}, r"RunConfig\.eval_every = 0"),
        (lambda: {"config": RunConfig(seed=3)}, "run.seed = 3: the scenario was made with seed 0"),
        (lambda: {"engine": EngineConfig(name="threads", threads=2)}, "threads = 2"),
        (lambda: {"federation": FederationConfig(fraction=2)}, r"FederationConfig\.fraction = 2"),
    ],
)
def test_settings_from_python_are_checked_before_anything_is_made(tmp_path, settings, says):
    method = make("fedavg")
    with pytest.raises(ConfigError, match=says):
        simulate(toy_for(method), method, tmp_path / "no", **settings())
    assert not (tmp_path / "no").exists()


def test_a_state_that_does_not_fit_the_method_is_refused_and_kept(tmp_path):
    """A method whose State was changed meanwhile: the checkpoint is whole, so it is not thrown away."""
    run_toy(make("fedavg"), tmp_path, rounds=2)
    home = RunDirectory(tmp_path, solera.__version__, resume=True)
    with pytest.raises(RunError, match=r"round 1 is not a state of this method .*control"):
        home.latest(find_method("scaffold").State)
    home.close()
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def test_a_run_in_which_every_round_was_void_says_so(tmp_path, monkeypatch):
    from solera.core.federation import QuorumNotMet
    from solera.engines.faulty import Faulty

    open_engine = EngineConfig.open
    monkeypatch.setattr(EngineConfig, "open", lambda *a: Faulty(open_engine(*a), lambda c: "drop"))
    with pytest.raises(QuorumNotMet, match="none of the 2 rounds"):
        run_toy(make("fedavg"), tmp_path, rounds=2)
