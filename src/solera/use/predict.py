"""Classification of new samples by a trained model or a saved ensemble."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.errors import ConfigError, DataError, RunError
from ..data import from_tensors
from ..data.dataset import Spec
from ..data.encodings import Text
from ..data.tables import Given
from ..data.unlabelled import holds_texts, read_samples, texts_in
from ..place.placement import numerics
from ..runs.trust import code_of_run, warn_if_changed
from ..scenario.task_data import DataConfig, load_data, server_data
from ..train.fitting import logits_of
from .trained import Trained

CHUNK = 512  # samples in a batch


@dataclasses.dataclass(frozen=True)
class Predictions:
    """The predictions of a model for some samples."""

    by: str  # the model, or "ensemble"
    names: list[str]
    probabilities: Tensor  # [samples, classes]
    labels: Tensor | None  # the true labels, if known
    class_names: tuple[str, ...] = ()  # if known
    texts: Sequence[Text] = ()  # the samples themselves, if they were read as texts

    @property
    def classes(self) -> Tensor:
        """The most probable class of every sample; ties go to the lowest."""
        return self.probabilities.argmax(-1)

    @property
    def accuracy(self) -> float | None:
        return None if self.labels is None else float((self.classes == self.labels).double().mean())

    def rows(self, every: bool = False) -> Iterator[dict[str, Any]]:
        """One row for each sample: its name, its class (with the class name, if known) and the probability of that
        class; with `every`, the probabilities of all classes."""
        for i, (name, k) in enumerate(zip(self.names, self.classes.tolist(), strict=True)):
            row: dict[str, Any] = {"input": name, "class": k}
            if self.texts:
                text = self.texts[i]
                row["text"] = text if isinstance(text, str) else " | ".join(text)
            row |= {"name": self.class_names[k]} if self.class_names else {}
            row["probability"] = round(float(self.probabilities[i, k]), 6)
            if self.labels is not None:
                row["label"] = int(self.labels[i])
            if every:
                row |= {f"p{c}": round(p, 6) for c, p in enumerate(self.probabilities[i].tolist())}
            yield row


@numerics()
def predict(trained: Trained, source: Path | None, model: str | None = None, ensemble: bool = False) -> Predictions:
    """Classify the samples in `source`; without one, the run's own test set."""
    if ensemble and model is not None:
        raise ConfigError("--model and --ensemble cannot be used together")
    if ensemble:
        joined = trained.ensemble()
        by, ask = "ensemble", lambda x: joined(x)[0]
    else:
        by = trained.choose(model)
        module = trained.model(by)
        ask = lambda x: logits_of(module, x).softmax(-1)  # noqa: E731
    labels, texts, spec, data = None, [], trained.spec, trained.run.config.get("data", {})
    if data.get("task") == "causal-lm":
        raise RunError(f"{trained.run.path}: its models predict the next token, and texts have no class")
    if source is None:
        names, samples, labels = _own_test_set(trained)
    elif spec.vocabulary and holds_texts(source):
        texts = texts_in(source, Given(data.get("text_column"), data.get("pair_column")))
        if not texts:
            raise DataError(f"{source}: there are no texts in it")
        names, samples = [str(i) for i in range(len(texts))], trained.tokens(texts)
    else:
        names, samples = read_samples(source, spec.shape, trained.tokens if spec.vocabulary else None)
    what = str(source or "the test set")
    with torch.no_grad():
        said = [ask(prepared(spec, part, what)) for part in samples.split(CHUNK)]
    return Predictions(by, names, torch.cat(said), labels, spec.class_names, texts)


def prepared(spec: Spec, samples: Tensor, what: str) -> Tensor:
    """Samples of a user's own (bytes 0..255, or floats), checked, as input of a model."""
    if spec.vocabulary and samples.dtype.is_floating_point:
        raise DataError(f"{what}: samples are {samples.dtype}; expected token ids (integers)")
    if not spec.vocabulary and len(spec.shape) == 1:
        samples = samples.float()  # integers would be treated as token ids
    if spec.mean and samples.dtype.is_floating_point and float(samples.max()) > 1.5:
        raise DataError(f"{what}: values up to {float(samples.max()):g}; give bytes 0..255, or floats from 0 to 1")
    nothing = torch.zeros(len(samples), dtype=torch.int64)
    pair, vocabulary = (samples, nothing), spec.vocabulary or None
    known = from_tensors(pair, pair, spec.classes, what, spec.mean, spec.std, None, vocabulary)
    return known.prepare(known.test.inputs)


def _own_test_set(trained: Trained) -> tuple[list[str], Tensor, Tensor]:
    """The samples that the run was judged on, made again by the same steps."""
    config = trained.run.config
    try:
        data = DataConfig(**config.get("data", {}))
    except TypeError as e:  # a setting that this version does not have
        raise RunError(
            f"{trained.run.path}: its test set cannot be made again ({e}); name the samples to predict"
        ) from e
    with code_of_run(trained.run.path, trained.trust_code):
        known = (server_data if config.get("sites") else load_data)(data, trained.seed)
    if trained.columns:
        known = known.encoded([c.encoding for c in trained.columns])
    warn_if_changed(trained.run.path, data.name)
    return [str(i) for i in range(len(known.test))], known.test.inputs, known.test.labels
