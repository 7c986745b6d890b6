"""The mistakes and mishaps that are explained in one line. `exit_code` is what the command line returns."""


class SoleraError(Exception):
    """Something went wrong that the person can understand and act on."""

    exit_code = 1


class ConfigError(SoleraError):
    """A setting that is unknown, of the wrong type, or impossible."""

    exit_code = 2


class DataError(SoleraError):
    """Data that is missing, or is not what it should be."""

    exit_code = 3


class RunError(SoleraError):
    """A run directory that is in use, damaged, or written by another version."""

    exit_code = 4
