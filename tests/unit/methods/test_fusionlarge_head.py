"""The head that all models share: in it clients have equal weights, whatever their sizes."""

from collections import Counter

import pytest
import torch

from cohorts import SIZES, Federated, settings
from solera.methods.steps.screen import Screen
from solera.train.distill import Distill


@pytest.mark.parametrize("average", ["weighted", "uniform"])
def test_the_server_s_head_is_the_plain_mean_of_the_cohort_s(tmp_path, average):
    method = settings("fusionlarge", head="shared", screen=Screen(average), fusion=Distill(steps=0))
    world, sent = Federated(tmp_path, method), {}
    ask = world.fed.map

    def asked(*args, **payload):
        sent.update(replies := ask(*args, **payload))
        return replies

    world.fed.map = asked
    world.play(1, ["c0", "c1", "c3", "c3"])
    copies = Counter(c0=1, c1=1, c3=2)
    large, small = world.states[-1].large.weights, world.states[-1].small
    for name in (a for a in large if a.startswith("head.")):
        mean = sum(copies[k] * sent[k].weights[name] for k in copies) / 4
        for weights in (large, small["w"], small["d"]):
            torch.testing.assert_close(weights[name], mean, rtol=0, atol=1e-6)
    n = {k: copies[k] * (SIZES[int(k[1])] if average == "weighted" else 1) for k in ("c0", "c3")}
    for name in (a for a in small["w"] if not a.startswith("head.")):
        mean = sum(n[k] * sent[k].weights[name] for k in n) / sum(n.values())
        torch.testing.assert_close(small["w"][name], mean, rtol=0, atol=1e-6)
