"""FedFTG's generator, step by step with torch's own Adam: one step for each client's model."""

import pytest
import torch

from solera.methods.fedftg import FineTune, fine_tune, input_generator
from solera.testing.toys import stacked, wide
from solera.train.generators import draw


def distances(noise: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """exp(-mean over all pairs of |noise_i - noise_j|^2 |x_i - x_j|_1), each divided by its dimension."""
    n, total = len(x), torch.zeros(())
    for i in range(n):
        for j in range(n):
            total = total + (noise[i] - noise[j]).square().mean() * (x[i] - x[j]).abs().mean()
    return (-total / n**2).exp()


@pytest.mark.parametrize("weights", [(1.0, 0.0, 2.0), (0.5, 1.0, 1.0)])
def test_the_generator_s_steps_by_hand(weights):
    """Each client's loss is its share of the labels times (fidelity CE - hardness |z_k - z|), and its part of the
    diversity term, which all clients' losses together have once."""
    fidelity, hardness, diversity = weights
    torch.manual_seed(0)
    teachers, students = [wide(), wide()], [wide(), stacked()]
    for model in (*teachers, *students):
        model.eval()
    G = input_generator((8,), 3, 3, 2)
    by_hand = input_generator((8,), 3, 3, 2)
    by_hand.load_state_dict(G.state_dict())
    alpha, prior = torch.tensor([[0.25, 1.0, 0.0], [0.75, 0.0, 1.0]]), torch.tensor([0.5, 0.25, 0.25])
    cfg = FineTune(
        steps=1, batch=6, noise=3, student_steps=0, fidelity=fidelity, hardness=hardness, diversity=diversity
    )
    fine_tune(G, students, teachers, alpha, prior, cfg, 0.1, torch.Generator().manual_seed(5))

    noise, y = draw(prior, 6, 3, torch.Generator().manual_seed(5))
    adam = torch.optim.Adam(by_hand.parameters(), lr=cfg.generator_lr)
    by_hand.train()
    for k, teacher in enumerate(teachers):
        x = by_hand(noise, y)
        share, z = alpha[k, y], teacher(x)
        cross = -z.log_softmax(-1)[range(6), y]
        apart = sum((z - student(x)).abs().mean(-1) for student in students) / 2
        loss = (share * (fidelity * cross - hardness * apart)).mean() + diversity * distances(noise, x) / 2
        adam.zero_grad()
        loss.backward()
        adam.step()
    for name, p in by_hand.named_parameters():
        if name != "net.0.bias":  # before BatchNorm: no gradient, and Adam makes full steps of rounding errors
            torch.testing.assert_close(dict(G.named_parameters())[name], p, rtol=1e-3, atol=2e-4)
