"""Contracts that every method and every engine must satisfy, for use by other packages, too.

`check_method(MyMethod(), tmp_path)` and `check_engine(open_engine, tmp_path)` raise AssertionError with the reason.
"""

from ..engines.faulty import Faulty
from .contracts import ENGINES_TO_COMPARE, Echo, check_engine, check_method
from .toys import deep, deep_group, large, run_toy, small, split_deep, split_wide, stacked, toy, toy_for, wide

__all__ = [
    "ENGINES_TO_COMPARE",
    "Echo",
    "Faulty",
    "check_engine",
    "check_method",
    "deep",
    "deep_group",
    "large",
    "run_toy",
    "small",
    "split_deep",
    "split_wide",
    "stacked",
    "toy",
    "toy_for",
    "wide",
]
