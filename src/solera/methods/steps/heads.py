"""The head that all models share: Fed-ET's representation layer."""

from ...core.tensors import Weights


def head_of(weights: Weights) -> Weights:
    """h, the representation layer: it includes the classifier."""
    return {name: t for name, t in weights.items() if name.startswith("head.")}
