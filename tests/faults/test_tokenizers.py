"""Two clients with different tokenizers and architectures (an encoder of word pieces, an LSTM over words) teach one
server: the same bits on all engines, and after kill -9."""

import json
import random
import time

import pytest

import fresh
from encoders import write_encoder
from solera.engines.engine_settings import ENGINES
from solera.runs import loop
from solera.runs.config import load_config

pytest.importorskip("transformers", reason="needs the extra text")

SCRIPT = """
import json, logging, pathlib, sys
from solera.runs.config import load_config
from solera.runs import loop
logging.disable(logging.CRITICAL)
tables, out = json.loads(sys.argv[1]), pathlib.Path(sys.argv[2])
print("go", flush=True)
done = loop.run(load_config(tables), out, resume=True)
print(done.digest, flush=True)
"""


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    folder = write_encoder(tmp_path_factory.mktemp("hf") / "encoder")
    return {
        "run": {"rounds": 6},
        "data": {"name": "toy-text", "length": 12, "train_size": 60, "test_size": 12},
        "partition": {"kind": "iid", "clients": 2},
        "public": {"size": 16},
        "models": {"clients": [f"hf:{folder}", "lstm"], "server": "transformer", "head": "shared",
                   "options": {"lstm": {"hidden": 16, "embedding": 8}}},
        "method": {"name": "fusionlarge", "local": {"steps": 3, "batch": 8, "lr": 0.05},
                   "fusion": {"steps": 3, "batch": 8}},
        "engine": {"name": "inprocess", "workers": 1},
    }  # fmt: skip


@pytest.fixture(scope="module")
def expected(tables, tmp_path_factory):
    out = tmp_path_factory.mktemp("serial") / "run"
    digest = loop.run(load_config(tables), out).digest
    told = json.loads((out / "run.json").read_text())["experiment"]["data"]["encodings"]
    assert len({row["tokenizer"] for row in told}) == 2
    return digest


SLOW = {"ray": pytest.mark.slow}  # it starts a cluster
KINDS = [pytest.param(n, marks=SLOW.get(n, ())) for n in ("threads", "processes", "ray") if n in ENGINES]


@pytest.mark.parametrize("engine", KINDS)
def test_every_engine_gives_the_same_bits(tables, expected, tmp_path, engine):
    if engine == "ray":
        pytest.importorskip("ray", reason="needs the extra ray")
    asked = load_config(tables, [f"engine.name={engine}", "engine.workers=2"])
    assert loop.run(asked, tmp_path / "run").digest == expected


def test_kill_nine(tables, expected, tmp_path):
    """Killed as soon as a round is on the disk, twice, somewhere in the next one."""
    run, moments = tmp_path / "run", random.Random(26)
    for rounds in (1, 2):
        process = begun(tables, run)
        while rounds_of(run) < rounds and process.returncode is None:
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.1))
        process.kill()
        process.communicate()
        assert rounds_of(run) < 6, "it was done before it was killed"
    said, why = begun(tables, run).communicate()
    assert said.strip() == expected, why


def begun(tables, run) -> fresh.Process:
    process = fresh.Process("-c", SCRIPT, json.dumps(tables), run)
    assert process.stdout.readline() == b"go\n", process.stderr.read().decode()
    return process


def rounds_of(run) -> int:
    file = run / "metrics.jsonl"
    return file.read_text().count("\n") if file.is_file() else 0
