"""FedLab's standalone pipeline: one client after another in one process, with torch's threads."""

import contextlib
import sys
import types

import torch
from pace import Pace
from torch.utils.data import DataLoader, TensorDataset
from work import Work

# FedLab imports torchvision for data sets of its own, which are not used here. An installed one that was built for
# another build of torch cannot be imported, and must not be what stops FedLab.
with contextlib.suppress(ImportError, RuntimeError):
    import torchvision  # noqa: F401
if "torchvision" not in sys.modules:
    sys.modules["torchvision"] = types.ModuleType("torchvision")
    sys.modules["torchvision.transforms"] = types.ModuleType("torchvision.transforms")
    sys.modules["torchvision"].transforms = sys.modules["torchvision.transforms"]

from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.core.standalone import StandalonePipeline


class Clients:
    """What FedLab asks of a federated data set."""

    def __init__(self, work: Work):
        self.work, self.batches = work, 0

    def get_dataloader(self, client: int, batch_size: int) -> DataLoader:
        loader = DataLoader(TensorDataset(*self.work.client(client)), batch_size, shuffle=True)
        self.batches += len(loader)
        return loader


class Paced(StandalonePipeline):
    """Waits where others would evaluate: after each round."""

    pace: Pace

    def evaluate(self) -> None:
        self.pace.lap()
        if not self.handler.if_stop:
            self.pace.go()


def main(folder: str) -> None:
    pace, work = Pace(), Work(folder)
    torch.set_num_threads(work.threads)
    model = work.model()
    handler = SyncServerHandler(model, work.rounds, work.cohort / work.clients)
    trainer = SGDSerialClientTrainer(model, work.clients)
    clients = Clients(work)
    trainer.setup_dataset(clients)
    trainer.setup_optim(1, work.batch, work.lr)
    pipeline = Paced(handler, trainer)
    pipeline.pace = pace
    pace.ready()
    pace.go()
    pipeline.main()
    pace.end(steps=clients.batches, accuracy=work.accuracy(handler.model))


if __name__ == "__main__":
    main(sys.argv[1])
