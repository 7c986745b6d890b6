"""Small language models: token ids (int64 [n, L]) in, features of every position out (float32 [n, L, width]).

Position i sees the tokens up to i and nothing later, so a linear layer on its features predicts token i + 1. All of
them read bytes (`solera.data.encodings.BYTES`), so they may teach each other.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from solera.core.errors import ConfigError
from solera.data.encodings import BYTES
from solera.models.registry import zoo_model
from solera.models.zoo.layers import Body, dropout_rate, positive


class Block(nn.Module):
    """Causal self-attention and a two-layer network, each after a LayerNorm and with a shortcut around it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.rate = heads, dropout
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        parts = self.queries_keys_values(self.before_attention(x)).view(n, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.rate if self.training else 0.0)
        x = x + self.dropout(self.joined(seen.transpose(1, 2).reshape(n, length, width)))
        out: Tensor = x + self.dropout(self.mlp(self.before_mlp(x)))
        return out


class Transformer(nn.Module):
    """A decoder-only transformer with learned positions."""

    def __init__(self, vocabulary: int, length: int, width: int, layers: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        places = self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        out: Tensor = self.norm(self.blocks(self.tokens(tokens) + places))
        return out


class EveryState(nn.Module):
    """The LSTM's output at every token."""

    def __init__(self, vocabulary: int, embedding: int, hidden: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(
            embedding, hidden, num_layers=layers, batch_first=True, dropout=dropout if layers > 1 else 0.0
        )

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.lstm(self.embedding(tokens))[0]
        return out


def _add_gpt(name: str, width_: int, layers_: int, heads_: int) -> None:
    @zoo_model(name, encoding=lambda: BYTES)
    def gpt(
        shape: tuple[int, ...],
        vocabulary: int,
        width: int = width_,
        layers: int = layers_,
        heads: int = heads_,
        dropout: float = 0.0,
    ) -> Body:
        for option, value in (("width", width), ("layers", layers), ("heads", heads)):
            positive(option, value)
        if width % heads:
            raise ConfigError(f"model {name!r}: width = {width} cannot be divided among heads = {heads}")
        return Transformer(vocabulary, shape[0], width, layers, heads, dropout_rate(dropout)), width


_add_gpt("gpt-nano", 64, 2, 2)
_add_gpt("gpt-micro", 128, 4, 4)


@zoo_model("lstm-lm", encoding=lambda: BYTES)
def lstm_lm(
    shape: tuple[int, ...],
    vocabulary: int,
    embedding: int = 64,
    hidden: int = 128,
    layers: int = 1,
    dropout: float = 0.0,
) -> Body:
    for option, value in (("embedding", embedding), ("hidden", hidden), ("layers", layers)):
        positive(option, value)
    rate = dropout_rate(dropout)
    if rate and layers == 1:
        raise ConfigError(f"model 'lstm-lm': dropout = {rate} acts between layers and needs layers of at least 2")
    return EveryState(vocabulary, embedding, hidden, layers, rate), hidden
