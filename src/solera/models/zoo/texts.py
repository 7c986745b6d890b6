"""Text models: token ids (int64 [n, L]) in, features out.

Token 0 is taken for padding (option `padding`: another id, or None if there is none): it does not enter the mean of
text-bag, and the LSTM is read at the last token that is not padding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from solera.core.errors import ConfigError
from solera.models.registry import zoo_model
from solera.models.zoo.layers import Body, dropout_rate, positive


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
