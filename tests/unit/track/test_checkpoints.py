"""Checkpoints: whole and as they always were, or the changed tensors with references to older files."""

import dataclasses
import hashlib
import json
import pathlib
import random
import struct
import weakref

import pytest
import safetensors.torch
import torch

from solera.core.errors import RunError
from solera.core.tensors import Weights
from solera.core.wire import digest, encode
from solera.engines import Version
from solera.runs.directory import KEEP, RunDirectory, _pack, _unpack

PEOPLE, ASKED = 100, 10


@dataclasses.dataclass(frozen=True)
class State:
    models: dict[str, Weights]


@pytest.fixture
def home(tmp_path):
    opened = RunDirectory(tmp_path / "run", "0")
    yield opened
    opened.close()


def model(seed: int, size: int = 1000) -> Weights:
    g = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(size, generator=g), "b": torch.randn(10, generator=g)}


def people(count: int = PEOPLE) -> State:
    return State({f"c{k:03d}": model(k) for k in range(count)})


def after(state: State, t: int, asked: int = ASKED) -> State:
    """The next state: a new one, in which those who were not asked have the very tensors of the old one."""
    cohort = random.Random(t).sample(list(state.models), asked)
    return State(state.models | {k: model(1000 * (t + 1) + i) for i, k in enumerate(cohort)})


def files(home: RunDirectory) -> dict[str, int]:
    """The name and the size of every file under checkpoints/."""
    return {p.name: p.stat().st_size for p in (home.path / "checkpoints").rglob("*.safetensors")}


def written(state: object, ledger: dict[str, Version] | None = None, round: int = 0) -> bytes:
    """A checkpoint that refers to no other file."""
    return encode({"state": state, "ledger": _pack(ledger or {}), "round": torch.tensor(round)})


def kept(home: RunDirectory) -> list[pathlib.Path]:
    return sorted((home.path / "checkpoints").glob("*.safetensors"))


def newest(home: RunDirectory) -> pathlib.Path:
    return kept(home)[-1]


def notes(path: pathlib.Path) -> dict[str, str]:
    blob = path.read_bytes()
    (n,) = struct.unpack("<Q", blob[:8])
    return json.loads(blob[8 : 8 + n])["__metadata__"]


def again(home: RunDirectory, into=State):
    """What a run that is resumed finds."""
    home.close()
    opened = RunDirectory(home.path, "0", resume=True)
    try:
        return opened.latest(into)
    finally:
        opened.close()


def test_where_every_tensor_is_new_the_file_is_the_encoded_state_byte_for_byte(home):
    for t in range(4):
        state = State({k: model(10 * t + i) for i, k in enumerate("abc")})
        home.commit(t, state, {})
        assert newest(home).read_bytes() == written(state, round=t)
        assert newest(home).name == f"{t:06d}.{hashlib.sha256(written(state, round=t)).hexdigest()}.safetensors"
    assert [p.name[:6] for p in (home.path / "checkpoints").iterdir()] in (["000002", "000003"], ["000003", "000002"])


@pytest.mark.parametrize("count", [100, 400])
def test_a_round_writes_its_cohort_not_the_population(home, count):
    """Its own, and the one before, whose file belongs to the other checkpoint: 80,800 bytes are the tensors of twenty
    models, less those asked twice. Beside them stand the names of all."""
    state = people(count)
    home.commit(0, state, {})
    cohort, names = ASKED * 1010 * 4, 110 * 2 * count
    assert newest(home).stat().st_size > count / ASKED * cohort
    home.commit(1, state := after(state, 1), {})
    assert newest(home).stat().st_size > count / ASKED * cohort
    sizes = []
    for t in range(2, 7):
        state = after(state, t)
        home.commit(t, state, {})
        sizes.append(newest(home).stat().st_size)
    assert all(cohort < size < 2 * cohort + names for size in sizes), sizes
    assert digest(again(home)[1]) == digest(state)


def test_over_many_rounds_the_writing_stays_near_the_cohort_and_the_disk_near_the_state(home):
    state = people()
    whole = len(written(state))
    home.commit(0, state, {})
    sizes, most = 0, 0
    for t in range(1, 60):
        state = after(state, t)
        home.commit(t, state, {})
        sizes += newest(home).stat().st_size
        most = max(most, sum(files(home).values()))
        assert len(kept(home)) == KEEP
    # A fifth of the state each round and, as often as what is outdated has grown to a whole, one whole more.
    assert sizes < 59 * whole * 0.45
    assert most < 5.2 * whole  # twice for each checkpoint, and a whole one that is written anew
    assert digest(again(home)[1]) == digest(state)


def test_everything_is_written_anew_when_the_files_hold_twice_the_state(home):
    state = people(20)
    home.commit(0, state, {})
    anew = []
    for t in range(1, 40):
        state = after(state, t, asked=4)
        home.commit(t, state, {})
        assert sum(files(home).values()) < 5.2 * len(written(state))
        if "elsewhere" not in notes(newest(home)):
            assert newest(home).read_bytes() == written(state, round=int(newest(home).name[:6]))
            anew.append(t)
    assert 6 <= len(anew) <= 20


def test_where_references_would_save_less_than_half_everything_is_written(home):
    state = people(10)
    home.commit(0, state, {})
    home.commit(1, state, {})
    assert newest(home).read_bytes() == written(state, round=int(newest(home).name[:6]))
    state = after(state, 2, asked=6)
    home.commit(2, state, {})
    assert newest(home).read_bytes() == written(state, round=int(newest(home).name[:6]))
    home.commit(3, state, {})
    state = after(state, 4, asked=4)
    home.commit(4, state, {})
    assert "elsewhere" in notes(newest(home))


def test_a_tensor_that_was_written_to_is_written_again(home):
    state = people(10)
    home.commit(0, state, {})
    home.commit(1, state, {})
    state.models["c004"]["w"].add_(1)
    home.commit(2, state, {})
    assert newest(home).stat().st_size > 1000 * 4
    (held,) = json.loads(notes(newest(home))["elsewhere"]).values()
    assert len(held) == 19
    assert digest(again(home)[1]) == digest(state)


def test_equal_tensors_that_are_not_the_same_object_are_written(home):
    """Numbers of objects are used again: without a reference to each, a new tensor could be taken for a dead one."""
    expected = ""
    for t in range(6):
        state = State({k: {"w": torch.full((500,), float(t))} for k in "abcdef"})
        home.commit(t, state, {})
        assert newest(home).read_bytes() == written(state, round=int(newest(home).name[:6]))
        expected = digest(state)
        del state
    assert digest(again(home)[1]) == expected


def test_tensors_are_not_kept_alive_by_the_checkpoint(home):
    state = people(10)
    held = weakref.ref(state.models["c000"]["w"])
    home.commit(0, state, {})
    del state
    assert held() is None


def test_tensors_of_inference_mode_have_no_count_of_writes_and_are_always_written(home):
    with torch.inference_mode():
        state = State({"a": {"w": torch.ones(500)}})
    for t in range(3):
        home.commit(t, state, {})
        assert newest(home).read_bytes() == written(state, round=int(newest(home).name[:6]))


def test_one_tensor_in_several_places_of_a_state(home):
    shared = model(0)
    state = State(dict.fromkeys("abcd", shared))
    for t in range(3):
        home.commit(t, state, {})
    assert newest(home).stat().st_size < 1500
    assert digest(again(home)[1]) == digest(state)


def test_a_state_that_did_not_change_is_references_only_and_can_be_read(home):
    state = people(10)
    for t in range(5):
        home.commit(t, state, {})
    assert sorted(p.name[:6] for p in (home.path / "checkpoints/older").iterdir()) == ["000000", "000001"]
    rounds, back, _, damaged = again(home)
    assert (rounds, digest(back), damaged) == (5, digest(state), [])


def test_files_that_nothing_refers_to_are_gone(home):
    state = people()
    home.commit(0, state, {})
    for t in range(1, 30):
        state = after(state, t)
        home.commit(t, state, {})
        needed = {p.name for p in kept(home)}
        for path in kept(home):
            needed |= json.loads(notes(path).get("elsewhere", "{}")).keys()
        assert files(home).keys() == needed


def test_the_first_commit_after_a_resume_writes_everything_and_older_files_go_in_time(home):
    state = people(10)
    for t in range(4):
        state = after(state, t, 2)
        home.commit(t, state, {})
    home.close()
    opened = RunDirectory(home.path, "0", resume=True)
    rounds, state, _, _ = opened.latest(State)
    opened.rewind(rounds)
    before = files(opened)
    state = after(state, 4, 2)
    opened.commit(4, state, {})
    assert newest(opened).read_bytes() == written(state, round=4)
    assert files(opened).keys() >= {name for name in before if name[:6] == "000003"}
    for t in range(5, 9):
        state = after(state, t, 2)
        opened.commit(t, state, {})
    assert not files(opened).keys() & before.keys()
    opened.close()
    assert digest(again(opened)[1]) == digest(state)


def test_a_retired_file_is_no_checkpoint_to_fall_back_to(home):
    """The state of clients as old as that is gone: whoever went on from there would get other bits."""
    state = people(10)
    for t in range(4):
        state = after(state, t, 1)
        home.commit(t, state, {})
    assert (home.path / "checkpoints/older").is_dir()
    for path in kept(home):
        path.unlink()
    assert again(home)[0] == 0


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_one_damaged_file_never_costs_both_checkpoints(home, damage):
    """Whichever it is, of those that are checkpoints and of those they refer to."""
    state, states = people(10), []
    for t in range(7):
        states.append(state := after(state, t, 1))
        home.commit(t, state, {})
    everything = sorted((home.path / "checkpoints").rglob("*.safetensors"))
    assert len(everything) > KEEP + 2
    for path in everything:
        content = path.read_bytes()
        if damage == "truncated":
            path.write_bytes(content[:-1])
        else:
            path.unlink()
        rounds, back, _, damaged = again(home)
        assert rounds >= 6, f"{path} costs both"
        assert digest(back) == digest(states[rounds - 1])
        if rounds == 6 and path.name[:6] != "000006":
            assert str(path) in damaged[0]
            assert ("does not match the sha256" if damage == "truncated" else "No such file") in damaged[0]
        path.write_bytes(content)


def test_the_kept_checkpoints_share_no_file(home):
    state = people(20)
    for t in range(30):
        state = after(state, t, 2)
        home.commit(t, state, {})
        needs = [{p.name} | json.loads(notes(p).get("elsewhere", "{}")).keys() for p in kept(home)]
        assert len(needs) < KEEP or not needs[0] & needs[1]


def test_a_checkpoint_whose_files_are_whole_serves_where_the_newer_one_is_not(home):
    state = people(10)
    home.commit(0, state, {})
    home.commit(1, before := after(state, 1, 2), {})
    home.commit(2, after(before, 2, 2), {})
    home.commit(3, now := after(before, 3, 2), {})
    (third,) = (p for p in kept(home) if p.name.startswith("000002"))
    assert third.name not in notes(newest(home)).get("elsewhere", ""), "round 3 was built on round 1"
    newest(home).write_bytes(b"")
    rounds, _, _, damaged = again(home)
    assert rounds == 3
    assert damaged == ["checkpoint of round 3 is damaged: its content does not match the sha256 in its name"]
    assert digest(now) != digest(before)


def forge(home: RunDirectory, tensors: dict, tree: object, elsewhere: object) -> None:
    """A checkpoint whose sha256 is right and whose content is somebody's own. Its ledger has the numbers 7, 8, 9."""
    nothing = {"clients": {"$": 7}, "steps": {"$": 8}, "sha256": {"$": 9}}
    whole = {"state": tree, "ledger": nothing, "round": {"$": 10}}
    facts = {"tree": json.dumps(whole), "elsewhere": json.dumps(elsewhere)}
    empty = _pack({})
    tensors = tensors | {"7": empty.clients, "8": empty.steps, "9": empty.sha256, "10": torch.tensor(9)}
    blob = safetensors.torch.save(tensors, metadata=facts)
    folder = home.path / "checkpoints"
    folder.mkdir(exist_ok=True)
    (folder / f"000009.{hashlib.sha256(blob).hexdigest()}.safetensors").write_bytes(blob)


@pytest.mark.parametrize("name", ["../../outside.safetensors", "/etc/passwd", "000000.safetensors", "", "a\n"])
def test_a_name_in_a_file_cannot_lead_out_of_the_folder(home, name):
    blob = encode({"w": torch.ones(2)})
    (home.path.parent / "outside.safetensors").write_bytes(blob)
    forge(home, {}, {"w": {"$": 0}}, {name: {"0": 0}})
    with pytest.raises(RunError, match="is not the name of a checkpoint"):
        again(home, dict[str, torch.Tensor])


@pytest.mark.parametrize(
    ("tensors", "elsewhere", "says"),
    [
        ({}, "OTHER:7", "refers to tensor 7 of"),
        ({"0": torch.ones(2)}, "OTHER:0", "tensor 0 is both in the message and in another file"),
        ({}, [1, 2], "list"),
        ({}, {"x": 3}, "int"),
        ({}, {}, "expected a tensor"),
    ],
)
def test_references_that_make_no_sense_are_refused(home, tensors, elsewhere, says):
    home.commit(0, {"w": torch.ones(2)}, {})
    if isinstance(elsewhere, str):
        elsewhere = {newest(home).name: {"0": int(elsewhere.split(":")[1])}}
    forge(home, tensors, {"w": {"$": 0}}, elsewhere)
    with pytest.raises(RunError, match=says):
        again(home, dict[str, torch.Tensor])


def test_tensors_elsewhere_that_the_tree_does_not_name_are_refused(home):
    home.commit(0, {"w": torch.ones(2)}, {})
    forge(home, {"1": torch.ones(1)}, {"w": {"$": 1}}, {newest(home).name: {"0": 0}})
    with pytest.raises(RunError, match="1 tensors that the type does not declare"):
        again(home, dict[str, torch.Tensor])


def test_a_checkpoint_that_was_renamed_is_not_of_the_round_in_its_name(home):
    for t in range(3):
        home.commit(t, {"w": torch.full((2,), float(t))}, {})
    second, third = kept(home)
    third.rename(third.with_name("000009" + third.name[6:]))
    rounds, state, _, damaged = again(home, Weights)
    assert (rounds, state["w"].tolist()) == (2, [1, 1])
    assert [text.partition(" was renamed: ")[2] for text in damaged] == ["it is the checkpoint of round 2"]
    second.rename(second.with_name("000000" + second.name[6:]))
    assert again(home, Weights)[0] == 0


def test_a_checkpoint_after_a_round_without_a_line_is_not_used(home):
    for t in range(3):
        home.commit(t, {"w": torch.full((2,), float(t))}, {})
    rounds, state, _, damaged = home.latest(Weights, recorded=2)
    assert (rounds, state["w"].tolist()) == (2, [1, 1])
    assert damaged == ["checkpoint of round 2 cannot be used: metrics.jsonl has no valid line for round 2"]
    with pytest.raises(RunError, match=r"metrics\.jsonl has no valid line for round 1, and there is no earlier"):
        home.latest(Weights, recorded=1)


def test_a_folder_in_place_of_a_checkpoint_is_named_in_one_line(home):
    for t in range(2):
        home.commit(t, {"w": torch.ones(2)}, {})
    (home.path / "checkpoints" / f"000009.{'0' * 64}.safetensors").mkdir()
    rounds, _, _, damaged = again(home, Weights)
    assert (rounds, damaged) == (2, ["checkpoint of round 9 is damaged: Is a directory"])
    opened = RunDirectory(home.path, "0", resume=True)
    with pytest.raises(RunError, match=r"000009.*cannot be removed: "):
        opened.rewind(2)
    opened.close()


# ---- the ledger -------------------------------------------------------------------------------------


def test_the_ledger_comes_back_with_the_state_it_belongs_to(home):
    ledgers = [{"c07": Version(3, "0" * 64)}, {"c07": Version(3, "0" * 64), "anna-2": Version(10**11, "ab" * 32)}, {}]
    for t, ledger in enumerate(ledgers):
        home.commit(t, {"w": torch.ones(2)}, ledger)
        assert home.ledgers() == ledgers[max(0, t - 1) : t + 1]
        assert again(home, Weights)[2] == ledger
    home.close()
    opened = RunDirectory(home.path, "0", resume=True)
    opened.rewind(3)
    assert opened.ledgers() == ledgers[1:]
    opened.close()


def test_a_ledger_does_not_depend_on_the_order_of_replies(home):
    one, other = Version(1, "1" * 64), Version(2, "2" * 64)
    assert written({}, {"a": one, "b": other}) == written({}, {"b": other, "a": one})


def test_a_ledger_of_a_million_is_48_bytes_each(home):
    """Of a million clients, that is: a name of eight letters, eight bytes for the step, 32 for the sha256."""
    ledger = {f"c{i:06d}": Version(i, f"{i:064x}") for i in range(20_000)}
    size = len(written({}, ledger)) - len(written({}))
    assert size == pytest.approx(48 * len(ledger), rel=0.001)
    assert _unpack(_pack(ledger)) == ledger


def test_client_state_that_is_gone_falls_back_or_stops_with_its_name(home):
    for t in range(2):
        home.commit(t, {"w": torch.full((2,), float(t))}, {"c00": Version(t, f"{t}" * 64)})
    home.close()

    def check(ledger):
        if ledger["c00"].step in gone:
            raise RunError(f"the state of c00 is missing: file {ledger['c00'].step}")

    opened = RunDirectory(home.path, "0", resume=True)
    gone = {1}
    rounds, state, ledger, damaged = opened.latest(Weights, check)
    assert (rounds, state["w"].tolist(), ledger) == (1, [0, 0], {"c00": Version(0, "0" * 64)})
    assert damaged == ["checkpoint of round 1 cannot be used: the state of c00 is missing: file 1"]
    gone = {0, 1}
    with pytest.raises(RunError, match=r"the state of c00 is missing: file 1, .*another directory as `out`"):
        opened.latest(Weights, check)
    opened.close()


@pytest.mark.parametrize("change", [{"steps": torch.zeros(3)}, {"sha256": torch.zeros(1, 32, dtype=torch.uint8)}])
def test_a_ledger_that_makes_no_sense_is_refused(home, change):
    ledger = dataclasses.replace(_pack({"a": Version(0, "0" * 64), "b": Version(0, "0" * 64)}), **change)
    blob = encode({"state": {"w": torch.ones(1)}, "ledger": ledger, "round": torch.tensor(9)})
    (home.path / "checkpoints").mkdir()
    (home.path / "checkpoints" / f"000009.{hashlib.sha256(blob).hexdigest()}.safetensors").write_bytes(blob)
    with pytest.raises(RunError, match="ledger of 2 clients"):
        again(home, Weights)
