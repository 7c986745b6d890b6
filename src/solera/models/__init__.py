"""The model zoo, and the ways to bring one's own model.

`build("resnet20", classes=10, shape=(3, 32, 32))` makes a model by name; `MODELS` lists the names. Any torch module
works as a client's or the server's model; methods that need it in pieces take it after `wrap` or `as_split`.
"""

# The zoo's modules register their models when they are imported; the order here is that of `solera ls models`.
from solera.models.zoo import small, convolutional, texts as text, encoders, causal  # noqa: F401, I001
from solera.models.zoo.layers import Norm, NormKind
from solera.models.probe import Size, check_output, size_of
from solera.models.registry import MODELS, ModelInfo, build, encoding_of, model_info, register_model
from solera.models.split import Head, SplitModel, as_split, is_split, require_split, wrap

__all__ = [
    "MODELS",
    "Head",
    "ModelInfo",
    "Norm",
    "NormKind",
    "Size",
    "SplitModel",
    "as_split",
    "build",
    "check_output",
    "encoding_of",
    "is_split",
    "model_info",
    "register_model",
    "require_split",
    "size_of",
    "wrap",
]
