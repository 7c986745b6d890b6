"""FedBE's normalised Gaussian: a client's length counts by its examples, as its direction does."""

import torch

from solera.methods.framework.ensemble_trainers import normalised_gaussian


def test_the_length_of_a_sample_is_the_mean_length_by_examples():
    """Updates of lengths 2 and 6 in one direction, with 1 and 3 examples: no variance, and (2 + 3 * 6) / 4 = 5."""
    sent, direction = torch.tensor([1.0, 1.0]), torch.tensor([0.6, 0.8])
    models = [{"w": sent + 2 * direction}, {"w": sent + 6 * direction}]
    (found,) = normalised_gaussian(models, [1, 3], ["w"], 1, 0, {"w": sent})
    torch.testing.assert_close(found["w"], sent + 5 * direction, rtol=0, atol=1e-5)
