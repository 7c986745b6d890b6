"""The study of malicious clients: who they are, that it resumes, and that the page shows what was recorded."""

import json
import pathlib
import sys

import pytest
import torch

from solera.runs.config import load_config
from solera.scenario.scenario import Scenario

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import liar  # noqa: E402


def scenario():
    cfg = load_config(liar.merged(liar.BASE, liar.ROWS["feddf"][1]))
    return Scenario(cfg.data, cfg.models, cfg.partition, cfg.public, seed=0, workers=1)


def test_malicious_clients_flip_labels_or_answer_with_one_class():
    s = scenario()
    assert [s.roster[k].architecture for k in liar.malicious(s, 3)].count("mlp") == 2
    own = liar.malicious(s, 1)
    honest = s.client(own[0], 0, {}, s.place)
    assert torch.equal(liar.Lying(s, own, "flips").client(own[0], 0, {}, s.place).train.labels, 9 - honest.train.labels)
    lying = liar.Lying(s, own, "lies").client(own[0], 0, {}, s.place)
    assert len(lying.train) == 0
    logits = lying.model(s.server.init("mlp")).eval()(s.test.inputs[:4])
    assert torch.equal(logits, torch.tensor([[1e4] + [0.0] * 9] * 4))
    other = next(k for k in s.roster if k not in own)
    assert torch.equal(
        liar.Lying(s, own, "flips").client(other, 0, {}, s.place).train.labels,
        s.client(other, 0, {}, s.place).train.labels,
    )


def test_it_continues_where_it_was_stopped(tmp_path, monkeypatch, capsys):
    done, record = [], tmp_path / "noted.json"

    def run(tables, liars, how):
        done.append((tables["run"]["seed"], liars))
        if len(done) == 3:
            raise KeyboardInterrupt
        return {"accuracy": 0.5 + 0.1 * liars, "models": {}, "void": 0, "cpu_s": 0.0}

    monkeypatch.setattr(liar, "run", run)
    monkeypatch.setattr(sys, "argv", ["liar.py", "--only", "feddf", "--seeds", "0", "--record", str(record)])
    with pytest.raises(KeyboardInterrupt):
        liar.main()
    assert len(json.loads(record.read_text())) == 2
    liar.main()
    assert len(done) == 3 + 6  # of 2 alphas and 4 attacks, the two that were noted are not repeated
    assert [liars for _, liars in done[:2]] == [0, 0], "those without malicious clients come first"
    assert "| FedDF | 50.0 | 80.0 | 80.0 | 60.0 |" in capsys.readouterr().out


def test_the_page_shows_what_was_recorded():
    noted = json.loads(liar.NOTED.read_text())
    page = (ROOT / "docs" / "robustness.md").read_text("utf-8")
    assert liar.tables_of(noted, list(liar.SEEDS)).strip() in page
