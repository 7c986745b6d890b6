"""Numbers do not change by accident: final states on the toy federation, with the machines on which they came out.

A machine is known by its numeric fingerprint. On one of those in the file the digest must be equal; on any other the
results must be close. `make golden` records anew what this machine computes, after a change that is meant to change
numbers (which needs a line under "Numbers" in the changelog), or to add a machine.
"""

import json
import os
import pathlib

import pytest

import solera.methods  # noqa: F401  (registers them)
from solera.method import METHODS, find_method
from solera.place.fingerprint import fingerprint
from solera.testing import run_toy, small

RECORD = pathlib.Path(__file__).with_name("golden.json")


def outcome(name: str, out: pathlib.Path) -> tuple[str, dict]:
    """The digest, and what is close to the same on every machine."""
    result = run_toy(small(find_method(name)()), out)
    norms = {k: round(sum(t.double().norm().item() for t in m.weights.values()), 4) for k, m in result.models.items()}
    mean = result.summary.get("personal", {}).get("mean")
    return result.digest[:16], {"norms": norms, "personal": None if mean is None else round(mean, 4)}


def close_to(want: dict) -> dict:
    personal = want["personal"]
    return {
        "norms": pytest.approx(want["norms"], rel=1e-3),
        "personal": None if personal is None else pytest.approx(personal, abs=0.05),
    }


def recorded(before: dict | None, machine: str, digest: str, result: dict) -> dict:
    """The entry of a method with what a machine has computed now.

    A machine that has another digest than before shows that the numbers have changed: what others had is out of date.
    A machine that is new only adds its digest, and must be close to the others.
    """
    digests = {} if before is None else before["digests"]
    if before is None or digests.get(machine, digest) != digest:
        return {**result, "digests": {machine: digest}}
    close = {key: before[key] for key in result}
    assert result == close_to(close), "not close to the other machines: record on one of them first"
    return {**close, "digests": dict(sorted({**digests, machine: digest}.items()))}


@pytest.mark.skipif("SOLERA_RECORD_GOLDEN" not in os.environ, reason="records the goldens: make golden")
def test_record(tmp_path):
    before = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    lines = []
    for name in sorted(METHODS):
        digest, result = outcome(name, tmp_path / name)
        lines.append(f"{json.dumps(name)}: {json.dumps(recorded(before.get(name), fingerprint(), digest, result))}")
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    assert json.loads(RECORD.read_text()).keys() == METHODS.keys()


@pytest.mark.skipif("SOLERA_RECORD_GOLDEN" in os.environ, reason="is being recorded")
@pytest.mark.parametrize("name", sorted(METHODS))
def test_golden(name, tmp_path):
    golden = json.loads(RECORD.read_text())
    assert name in golden, f"{name} has no golden yet: make golden"
    want = golden[name]
    digest, result = outcome(name, tmp_path)
    assert result == close_to(want)
    assert digest == want["digests"].get(fingerprint(), digest)


def test_the_goldens_are_of_two_machines_whose_bits_differ():
    """One of them imitates another processor; see `make golden`."""
    entries = json.loads(RECORD.read_text()).values()
    machines = {machine for e in entries for machine in e["digests"]}
    assert len(machines) >= 2
    for e in entries:
        assert len(set(e["digests"].values())) == len(e["digests"])


def test_a_new_machine_adds_its_digest_and_a_change_of_numbers_drops_those_of_others():
    here = {"norms": {"deep": 2.0}, "personal": None}
    near = {"norms": {"deep": 2.0001}, "personal": None}
    first = recorded(None, "a", "1", here)
    both = recorded(first, "b", "2", near)
    assert both == {**here, "digests": {"a": "1", "b": "2"}}
    assert recorded(both, "a", "1", here) == both
    assert recorded(both, "b", "3", near) == {**near, "digests": {"b": "3"}}
    with pytest.raises(AssertionError, match="not close to the other machines"):
        recorded(first, "c", "4", {"norms": {"deep": 3.0}, "personal": None})
