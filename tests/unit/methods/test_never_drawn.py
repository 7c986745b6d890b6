"""Clients that were never drawn are judged with the common model, or not at all: never with an untrained one."""

from collections import Counter

import pytest

from solera.core.federation import Federation, FederationConfig
from solera.engines import ClientStates, InProcess
from solera.method import METHODS, find_method
from solera.testing import small, toy_for
from solera.train.fitting import evaluate

WITH_PERSONAL_SCORES = sorted(name for name in METHODS if find_method(name)().traits().personal)
ASKED, MISSED = ["c00", "c01", "c02"], ["c03", "c04"]
# what a client starts from that was never asked: of the state's models, that of its architecture
COMMON = {"ditto": lambda s, P: s.weights[P], "pfedme": lambda s, P: s.weights[P]}
# the server makes a model for anybody: tuned from a common one, generated, or chosen among several
MADE_FOR_ALL = {"fedavgft", "perfedavg", "pfeddf", "pfedhn", "ifca"}


@pytest.mark.parametrize("name", WITH_PERSONAL_SCORES)
def test_no_untrained_model_is_judged(name, tmp_path, monkeypatch):
    method = small(find_method(name)())
    scenario = toy_for(method)
    fed, server = Federation(InProcess(scenario, ClientStates(tmp_path)), 0, FederationConfig()), scenario.server
    state = method.init(fed, server)

    def sample() -> list[str]:
        fed.copies = Counter(ASKED)
        return ASKED

    monkeypatch.setattr(fed, "sample", sample)
    monkeypatch.setattr(fed, "config", FederationConfig(fraction=0.4))  # whoever looks: not everybody takes part
    for t in range(2):
        fed.begin(t)
        server.begin()
        state = method.round(state, fed, server)
    asked = method.personal(state, fed)
    scores = fed.map(asked.task, [*ASKED, *MISSED], **asked.payload)
    assert all(scores[k].total > 0 for k in ASKED)
    for k in MISSED:
        test = scenario.client(k, 0, {}).test
        if name in COMMON:
            common = server.model(fed.architecture(k), COMMON[name](state, fed.architecture(k)))
            assert scores[k] == evaluate(common, test.inputs, test.labels)
        else:
            assert scores[k].total == (len(test) if name in MADE_FOR_ALL else 0)
