"""Text models: token ids (int64 [n, L]) in, features out.

Token 0 is taken for padding (option `padding`: another id, or None if there is none): it does not enter the mean of
text-bag, and the LSTM is read at the last token that is not padding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from solera.core.errors import ConfigError
from solera.core.tensors import sent
from solera.models.registry import zoo_model
from solera.models.zoo.layers import Body, dropout_rate, positive
from solera.place.placement import tricks_of


class MeanEmbedding(nn.Module):
    """Mean of the embeddings of a sequence's tokens; zeros for a sequence of padding only."""

    def __init__(self, vocabulary: int, embedding: int, padding: int | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.padding = padding

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.embedding(tokens)
        real = _real(tokens, self.padding).unsqueeze(-1).to(embedded.dtype)
        return (embedded * real).sum(dim=1) / real.sum(dim=1).clamp(min=1)


class LastState(nn.Module):
    """The LSTM's output at the last token that is not padding."""

    def __init__(
        self, vocabulary: int, embedding: int, hidden: int, layers: int, dropout: float, padding: int | None
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(
            embedding, hidden, num_layers=layers, batch_first=True, dropout=dropout if layers > 1 else 0.0
        )
        self.padding = padding

    def forward(self, tokens: Tensor) -> Tensor:
        outputs, _ = self.lstm(self.embedding(tokens))
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        last = (positions * _real(tokens, self.padding)).amax(dim=1)
        return outputs[torch.arange(tokens.shape[0], device=tokens.device), last]


def _real(tokens: Tensor, padding: int | None) -> Tensor:
    return torch.ones_like(tokens, dtype=torch.bool) if padding is None else tokens != padding


def check_text(name: str, shape: tuple[int, ...], vocabulary: int, padding: int | None) -> None:
    """Refuse a shape that is not one of tokens, and a padding that is not one of them."""
    if len(shape) != 1:
        raise ConfigError(
            f"model {name!r} takes token sequences of shape (length,), not {shape}; for images use an image model"
        )
    if padding is not None and (not isinstance(padding, int) or not 0 <= padding < vocabulary):
        raise ConfigError(f"model {name!r}: padding = {padding!r} is not a token id below vocabulary = {vocabulary}")


@zoo_model("text-bag")
def text_bag(shape: tuple[int, ...], vocabulary: int, embedding: int = 128, padding: int | None = 0) -> Body:
    check_text("text-bag", shape, vocabulary, padding)
    return MeanEmbedding(vocabulary, positive("embedding", embedding), padding), embedding


@zoo_model("lstm")
def lstm(
    shape: tuple[int, ...],
    vocabulary: int,
    embedding: int = 128,
    hidden: int = 256,
    layers: int = 2,
    dropout: float = 0.0,
    padding: int | None = 0,
) -> Body:
    check_text("lstm", shape, vocabulary, padding)
    for option, value in (("embedding", embedding), ("hidden", hidden), ("layers", layers)):
        positive(option, value)
    rate = dropout_rate(dropout)
    if rate and layers == 1:
        raise ConfigError(f"model 'lstm': dropout = {rate} acts between layers and needs layers of at least 2")
    return LastState(vocabulary, embedding, hidden, layers, rate, padding), hidden


# ---- Texts of different lengths in one minibatch, without computing on most of the padding -------


BUCKETS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # tokens; longer texts are read in full


def real(ids: Tensor, padding: int) -> Tensor:
    """The tokens that are not padding. A text of padding keeps its first token: a model needs at least one."""
    mask = ids != padding
    first = ~mask.any(1)
    return torch.cat([(mask[:, 0] | first)[:, None], mask[:, 1:]], 1)


def bucket_of(ids: Tensor, padding: int) -> Tensor:
    """The length in which each text is read. int64 [n], on the CPU, with one read from the device."""
    places = torch.arange(1, ids.shape[1] + 1, device=ids.device)
    needed = (places * real(ids, padding)).amax(1).cpu()
    sizes = torch.tensor([*(b for b in BUCKETS if b < ids.shape[1]), ids.shape[1]])
    return sizes[torch.searchsorted(sizes, needed)]


def in_buckets(read: Callable[[Tensor], Tensor], ids: Tensor, padding: int, training: bool) -> Tensor:
    """The features that `read` gives for these texts, each in its own length: [n, features].

    Except in training, answers must not depend on the rest of the batch. So a bucket is filled up with copies of its
    last text to as many rows as the device needs for that.

    In training, an accelerator reads texts in full length with padding: the length they need would have to be read
    back from it at every step.
    """
    tricks = tricks_of(ids.device)
    if torch.jit.is_tracing() or torch.compiler.is_compiling():  # an exported model has one path for all texts
        return read(ids)
    if not len(ids):  # a dry run has no texts but needs the width of the answer
        return read(ids.new_full((1, ids.shape[1]), padding))[:0]
    if training and not tricks.reads_in_steps:
        return read(ids)
    buckets = bucket_of(ids, padding)
    sizes = buckets.unique().tolist()
    least = 1 if training else tricks.least_rows
    places, parts = [], []
    for size in sizes:
        rows = sent((buckets == size).nonzero().flatten(), ids.device)
        some = ids[rows, :size]
        if len(rows) < least:
            some = torch.cat([some, some[-1:].expand(least - len(rows), size)])
        places.append(rows)
        parts.append(read(some)[: len(rows)])
    if len(sizes) == 1:
        return parts[0]
    return torch.cat(parts).index_select(0, torch.cat(places).argsort())
