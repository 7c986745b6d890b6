"""FD, federated distillation (Jeong, Oh, Kim, Park, Bennis, Kim, 2018): devices exchange mean outputs per label.

Each device keeps its model, which may be of any architecture, and needs no public data. During its local steps it
averages its softmax outputs by the label of the sample. The mean of the *other* devices' averages regularises its
training. FAug, the paper's method to generate missing samples on devices, is not implemented.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.federation import Federation, per_client
from ..core.settings import NonNegative
from ..core.task import Client, task
from ..core.tensors import weights_of
from ..core.wire import sized
from ..method import About, Traits, register
from ..place.placement import finest, finest_type
from ..scenario.server import Server
from ..train.fitting import Local, fit
from .steps.personal import OnClients
from .steps.predictions import SUMS_TO_ONE, Done, answered, scores_of


@dataclass(frozen=True)
class LabelTable:
    """Mean class probabilities for each label, zeros for labels the device does not hold; or a mean of such tables."""

    rows: Tensor = sized("classes", "classes")

    def __post_init__(self) -> None:
        rows = self.rows
        if bool((rows < 0).any()) or bool((rows.sum(-1) > 1 + SUMS_TO_ONE).any()):
            raise ValueError("a table of labels whose rows are neither probabilities nor zeros")


@task("train_and_report")
def train_and_report(client: Client, local: Local, gamma: float, final_pass: bool, classes: int) -> LabelTable:
    """Train the client's own model, regularised by the others' averages, and report its own."""
    teacher = client.state.get("teacher", {"rows": torch.zeros(classes, classes)})["rows"]
    data, outputs = client.train, LabelSums(classes)

    def objective(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        logits = model(inputs)
        outputs.add(logits.detach().softmax(-1), labels)  # F_l: outputs during training, while the weights change
        return label_loss(logits, labels, table, gamma)

    model, table = client.model(client.state.get("model")), client.bring(teacher)
    fit(model, data.inputs, data.labels, local, client.seed, objective)
    client.state["model"] = weights_of(model)
    if final_pass:
        outputs = LabelSums(classes)
        outputs.add(scores_of(model, data.inputs).softmax(-1), data.labels)
    rows = outputs.means()
    client.state["reported"] = {"rows": rows}
    return LabelTable(rows)


@task("take_others")
def take_others(client: Client, total: Tensor, copies: int) -> Done:
    """Keep the mean of the other clients' tables: the mean of all tables without the client's own."""
    own = client.state.pop("reported")["rows"]
    client.state["teacher"] = {"rows": others(total, own * copies)}
    return Done()


@register("fd")
@dataclass(frozen=True)
class FD(OnClients):
    """Models that regularise each other by their mean output for each label."""

    local: Local = field(default_factory=lambda: Local(steps=250, batch=64))
    gamma: NonNegative = 0.01  # weight of the others' averages in the loss; 0: local training
    final_pass: bool = False  # average the outputs of the trained model, not the outputs during training

    about: ClassVar[About] = About(
        "FD", "Jeong et al., 2018", "a table of classes x classes up, another down", "its model, and the others' table"
    )

    @dataclass(frozen=True)
    class State:
        table: Tensor  # the last cohort's mean output for each label, zeros if no client held it

    def traits(self) -> Traits:
        return Traits(across="knowledge", replies="means", personal=True)

    def init(self, fed: Federation, server: Server) -> State:
        return self.State(torch.zeros(server.num_classes, server.num_classes))

    def round(self, state: State, fed: Federation, server: Server) -> State:
        S, C = fed.sample(), server.num_classes
        how: dict[str, Any] = {"local": self.local, "gamma": self.gamma, "final_pass": self.final_pass}
        mean = fed.mean(train_and_report, S, uniform=True, classes=C, **how)  # F_i,l of every device i and label l
        S = answered(S, fed)
        copies = {k: fed.copies.get(k, 1) for k in S}
        total = mean.rows * sum(copies.values())
        # Device i computes the mean over j != i from the sum and its own table: the server sees no single table.
        fed.mean(take_others, S, uniform=True, total=total, copies=per_client(copies.__getitem__))
        return self.State(others(total, torch.zeros_like(total)))


class LabelSums:
    """Sums of class probabilities by the label of the sample, in float64 and in the order they are added."""

    def __init__(self, classes: int):
        self.sums = torch.zeros(classes, classes, dtype=torch.float64)
        self.counts = torch.zeros(classes, dtype=torch.float64)

    def add(self, probs: Tensor, labels: Tensor) -> None:
        """Add the rows of `probs`, each with its label."""
        fine = finest_type(probs.device)
        self.sums = self.sums.to(probs.device, fine)  # stays where the first predictions were
        self.counts = self.counts.to(probs.device, fine)
        self.sums.index_add_(0, labels, probs.to(fine))
        self.counts.index_add_(0, labels, probs.new_ones(len(labels), dtype=fine))

    def means(self) -> Tensor:
        """The table: the mean for each label, zeros for labels without samples."""
        return (self.sums / self.counts.clamp_min(1)[:, None]).float()


def others(total: Tensor, own: Tensor) -> Tensor:
    """The mean table of all clients but one, from the sum of all tables and that client's own table.

    The number of other clients with a label is not needed: each of their rows sums to 1, so dividing the difference by
    its sum gives the mean. If no other client holds the label, only rounding errors remain, and the row is 0.
    """
    left = (finest(total) - finest(own)).clamp_min(0)
    holders = left.sum(-1, keepdim=True)
    return torch.where(holders > 0.5, left / holders, 0.0).float()


def label_loss(logits: Tensor, labels: Tensor, table: Tensor, gamma: float) -> Tensor:
    """phi(F, y) + gamma phi(F, table_y), mean over the batch: phi is cross-entropy and F the softmax of the logits.

    A row of zeros adds nothing: a label that no other client holds is learned from the samples alone.
    """
    own = F.cross_entropy(logits, labels)
    if gamma == 0:
        return own
    taught = table[labels].to(logits.dtype)
    return own - gamma * (taught * logits.log_softmax(-1)).sum(-1).mean()
