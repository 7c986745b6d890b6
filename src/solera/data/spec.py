"""The facts of a data set that a model must know: shape, classes, normalisation constants, vocabulary."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..core.errors import ConfigError, DataError
from .encodings import WORDS, Columns, Encoding, Text, encoded
from .transforms import normalise

Task = Literal["classification", "causal-lm"]


@dataclass(frozen=True)
class Spec:
    """The facts of a data set. A `Dataset` is a spec with samples; sites and trained models have only the spec."""

    name: str
    shape: tuple[int, ...]  # of one prepared sample
    classes: int
    mean: tuple[float, ...] = ()  # per channel, on the scale [0, 1]; empty: no normalisation
    std: tuple[float, ...] = ()
    vocabulary: int = 0  # text only: the number of token ids
    class_names: tuple[str, ...] = ()  # if known
    columns: tuple[Columns, ...] = ()  # of each tokenizer in a sample; empty: there is one, and it has all of them
    task: Task = "classification"  # causal-lm: a sample is a block of tokens, and all but its first are predicted

    @property
    def spec(self) -> "Spec":
        """The facts alone, without samples."""
        return Spec(**{f.name: getattr(self, f.name) for f in fields(Spec)})

    @property
    def outputs(self) -> int:
        """The number of a model's outputs for one prediction: classes, or tokens."""
        return self.classes if self.task == "classification" else self.vocabulary

    @property
    def length(self) -> int:
        """Text only: the tokens that one model reads of a text."""
        return self.columns[0].length if self.columns else self.shape[0]

    @property
    def tokenizer(self) -> str:
        """The names of the tokenizers that models bring; "" if they bring none."""
        return ", ".join(c.encoding.name for c in self.columns)

    def read_by(self, encoding: Encoding) -> "Spec":
        """The spec of a party whose model has this tokenizer: its samples hold no other tokens."""
        if encoding == WORDS and not self.columns:
            return self
        if not self.vocabulary:
            raise ConfigError(
                f"{self.name}: a model brings the tokenizer {encoding.name!r} and needs texts, but samples have shape "
                f"{self.shape}; choose another model, or data of texts (data.name = 'texts')"
            )
        own = () if encoding == WORDS else (Columns(encoding, 0, self.length),)
        return replace(self, shape=(self.length,), vocabulary=encoding.vocabulary, columns=own)

    def prepare(self, inputs: Tensor) -> Tensor:
        """Stored samples as input of a model: normalised float32, or tokens unchanged."""
        return normalise(inputs, self.mean, self.std)

    def tokens(self, texts: Sequence[Text]) -> Tensor:
        """Texts as samples."""
        return encoded(texts, [c.encoding for c in self.columns] or [WORDS], self.length)[0]

    def numbers(self, labels: Sequence[Any], what: str) -> Tensor:
        """Labels (names or numbers) as numbers of classes."""
        known = {name: i for i, name in enumerate(self.class_names)}
        found = [str(label) for label in labels]
        if strange := sorted({label for label in found if label not in known and not label.isdecimal()}):
            said = ", ".join(self.class_names[:10]) or f"0 to {self.classes - 1}"
            raise DataError(f"{what}: the class {strange[0]!r} is not one of data.classes ({said})")
        return torch.tensor([known[n] if n in known else int(n) for n in found], dtype=torch.int64)
