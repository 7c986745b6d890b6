"""Methods: one paper, one file. Importing this package puts them into the table of methods."""

from . import baselines, fedavg, feddf, fedet, scaffold

__all__ = ["baselines", "fedavg", "feddf", "fedet", "scaffold"]
