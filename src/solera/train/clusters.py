"""How a client chooses its cluster (IFCA)."""

import math
from collections.abc import Sequence


def lowest(losses: Sequence[float]) -> int:
    """The position of the lowest loss; with ties the first. NaN counts as infinite."""
    comparable = [math.inf if math.isnan(loss) else loss for loss in losses]
    return comparable.index(min(comparable))
