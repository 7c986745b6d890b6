"""FedGen's objective on a client: which of its terms move what."""

import pytest
import torch

from solera.methods.fedgen import latent_generator, with_latents
from solera.models import wrap
from solera.train.generators import draw
from toys import images, mlp


@pytest.mark.parametrize(("alpha", "beta"), [(0.0, 3.0), (2.0, 0.0), (2.0, 3.0)])
def test_the_client_s_gradient_by_hand(alpha, beta):
    """What the head says of latents is a target: it pulls the prediction, and is not pulled itself."""
    torch.manual_seed(0)
    model = wrap(mlp(0), classifier="3", representation=8, head_hidden=8).eval()
    G = latent_generator(8, 3, 4, 6).eval().requires_grad_(False)
    x, y = images(10)
    prior = torch.tensor([0.5, 0.0, 0.5, 0.0])
    loss = with_latents(G, prior, 6, alpha, beta, torch.Generator().manual_seed(4))(model, x, y)
    found = torch.autograd.grad(loss, list(model.parameters()))

    rng = torch.Generator().manual_seed(4)
    noise, labels = draw(prior, 6, 3, rng) if alpha else (None, None)
    q = model(x).log_softmax(-1)
    expected = -q[range(10), y].mean()
    if alpha:
        assert set(labels.tolist()) <= {0, 2}
        expected = expected - alpha * model.head(G(noise, labels)).log_softmax(-1)[range(6), labels].mean()
    if beta:
        with torch.no_grad():
            p = model.head(G(torch.randn(10, 3, generator=rng), y)).softmax(-1)
        expected = expected + beta * (p * (p.log() - q)).sum(-1).mean()
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for g, w in zip(found, wanted, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-6)
