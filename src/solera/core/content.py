"""What messages consist of, in bytes: the bars of MNFL's Figure 3.

    data         public samples, which clients are sent once if they do not hold them (public.where = "server")
    parameters   weights of models: tables of tensors
    predictions  other floating-point tensors: probabilities, logits, features

The rest of a message (indices, numbers, its header) is neither.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor

KINDS = ("data", "parameters", "predictions")


def content_of(value: Any) -> Counter[str]:
    """Bytes by kind of the tensors in a message."""
    found: Counter[str] = Counter()
    if isinstance(value, Tensor):
        if value.is_floating_point():
            found["predictions"] = value.numel() * value.element_size()
    elif isinstance(value, Mapping) and value and all(isinstance(t, Tensor) for t in value.values()):
        found["parameters"] = sum(t.numel() * t.element_size() for t in value.values())
    elif dataclasses.is_dataclass(value):
        for f in dataclasses.fields(value):
            found += content_of(getattr(value, f.name))
    else:
        for inner in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
            found += content_of(inner)
    return found
