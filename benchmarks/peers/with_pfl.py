"""pfl-research's simulated backend: one client after another in one process, with torch's threads."""

import sys

import torch
import torch.nn.functional as F
from pace import Pace
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm import FederatedAveraging, NNAlgorithmParams
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from work import Work


class WithLoss(nn.Module):
    """The model with the two methods pfl wants it to have."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model, self.steps = model, 0

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(inputs)

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        self.train()
        self.steps += 1
        return F.cross_entropy(self(inputs), labels)

    @torch.no_grad()
    def metrics(self, inputs: Tensor, labels: Tensor) -> dict[str, Weighted]:
        return {"loss": Weighted(F.cross_entropy(self(inputs), labels, reduction="sum").item(), len(labels))}


class Paced(TrainingProcessCallback):
    """Waits after each round."""

    def __init__(self, pace: Pace, rounds: int):
        self.pace, self.left = pace, rounds

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        self.pace.ready()
        self.pace.go()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.pace.lap()
        self.left -= 1
        if self.left:
            self.pace.go()
        return False, Metrics()


def main(folder: str) -> None:
    pace, work = Pace(), Work(folder)
    torch.set_num_threads(work.threads)
    wrapped = WithLoss(work.model())
    central = torch.optim.SGD(wrapped.parameters(), 1.0)  # the new model is the mean of the clients'
    model = PyTorchModel(wrapped, torch.optim.SGD, central)
    held = {k: Dataset(list(work.client(k)), user_id=k) for k in range(work.clients)}
    data = FederatedDataset(held.__getitem__, get_user_sampler("minimize_reuse", list(held)))
    never = work.rounds + 1  # no evaluation: nobody else makes one
    FederatedAveraging().run(
        NNAlgorithmParams(work.rounds, never, work.cohort, None),
        SimulatedBackend(data, data),
        model,
        NNTrainHyperParams(local_batch_size=work.batch, local_num_epochs=1, local_learning_rate=work.lr),
        NNEvalHyperParams(local_batch_size=None),
        [Paced(pace, work.rounds)],
    )
    pace.end(steps=wrapped.steps, accuracy=work.accuracy(wrapped))


if __name__ == "__main__":
    main(sys.argv[1])
