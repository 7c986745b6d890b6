"""Numbers do not change by accident: final states on the toy federation, recorded with where they were computed.

On the same torch build and CPU features the digest must be equal; elsewhere the results must be close. To record
anew after a change that is meant to change numbers (which needs a line under "Numbers" in the changelog):

    SOLERA_RECORD_GOLDEN=1 pytest tests/golden
"""

import json
import os
import pathlib

import pytest
import torch

import solera.methods  # noqa: F401  (registers them)
from solera.method import METHODS, find_method
from solera.testing import run_toy, small

RECORD = pathlib.Path(__file__).with_name("golden.json")


def environment() -> dict:
    return {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability(), "threads": 1}


def outcome(name: str, out: pathlib.Path) -> dict:
    result = run_toy(small(find_method(name)()), out)
    norms = {k: round(sum(t.double().norm().item() for t in m.weights.values()), 6) for k, m in result.models.items()}
    return {"digest": result.digest, "norms": norms, "personal": result.summary.get("personal", {}).get("mean")}


@pytest.mark.skipif("SOLERA_RECORD_GOLDEN" not in os.environ, reason="records the goldens; set SOLERA_RECORD_GOLDEN=1")
def test_record(tmp_path):
    golden = {name: outcome(name, tmp_path / name) for name in sorted(METHODS)}
    RECORD.write_text(json.dumps({"environment": environment(), "methods": golden}, indent=1) + "\n")
    assert len(golden) == len(METHODS)


@pytest.mark.skipif("SOLERA_RECORD_GOLDEN" in os.environ, reason="is being recorded")
@pytest.mark.parametrize("name", sorted(METHODS))
def test_golden(name, tmp_path):
    golden = json.loads(RECORD.read_text())
    assert name in golden["methods"], f"{name} has no golden yet: SOLERA_RECORD_GOLDEN=1 pytest tests/golden"
    want, got = golden["methods"][name], outcome(name, tmp_path)
    if golden["environment"] == environment():
        assert got == want
    else:
        assert got["norms"] == pytest.approx(want["norms"], rel=1e-3)
        assert got["personal"] == pytest.approx(want["personal"], abs=0.05)
