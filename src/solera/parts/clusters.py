"""Clusters of clients that find themselves (IFCA)."""

import math
from collections.abc import Sequence


def lowest(losses: Sequence[float]) -> int:
    """The position of the lowest loss: of several, the first. A loss that is not a number counts as infinite."""
    comparable = [math.inf if math.isnan(loss) else loss for loss in losses]
    return comparable.index(min(comparable))
