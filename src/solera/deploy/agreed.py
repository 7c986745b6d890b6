"""The agreement on what a server may ask of a site: which tasks, and with which arguments beside tensors.

`solera deploy init` goes through the run without training (`asked_by`) and writes the requests into each site's file. A
site refuses everything else, so even a dishonest server gets only what the agreed run gets.
"""

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..core.calls import SHA256, Call, Host, Reply, Roster
from ..core.errors import ConfigError
from ..core.settings import show
from ..core.wire import WireError
from ..engines.dry import Dry
from ..engines.serve import arguments_of, most_due
from ..method import prepare_scoring
from ..runs.config import Config
from ..runs.rehearsal import rehearse
from ..runs.sites import build_sites
from ..scenario.host import Hello
from .templates import NO_TASKS

Scalar = bool | int | float | str
ANY, OWN = "*", "own examples"  # bounds of an argument: any value; the number of the site's training samples
LARGEST = 1 << 32  # integers above this are seeds, not amounts
ROUNDS = 3  # at least: some tasks are only sent to clients that have taken part before
SIZES = 101  # samples of the first site, one more for each further site: numbers that no setting has
MOST_NOTED, MOST_VALUES, MOST_TEXT = 2000, 8, 64  # characters of a log line, values of an argument, letters of a value


def scalars(value: Any, path: str = "") -> Iterator[tuple[str, Scalar]]:
    """The scalars in a task's arguments, each with the name of its field. Items of a list, and names and values of a
    mapping, have the name of the whole. Tensors are left out, and so are their names."""
    if isinstance(value, bool | int | float | str):
        yield path, value
    elif isinstance(value, Mapping):
        for name, v in value.items():
            if path and not isinstance(v, Tensor):
                yield path, name
            yield from scalars(v, path or name)
    elif isinstance(value, Sequence):
        for v in value:
            yield from scalars(v, path)
    elif dataclasses.is_dataclass(value):
        for f in dataclasses.fields(value):
            yield from scalars(getattr(value, f.name), f"{path}.{f.name}")


def noted(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The scalars of a call for the site's log, limited to one line."""
    told: dict[str, Any] = {}
    room = MOST_NOTED
    for path, values in _grouped(scalars(arguments)).items():
        few: list[Any] = [v[:MOST_TEXT] if isinstance(v, str) else v for v in values[:MOST_VALUES]]
        few += ["..."] if len(values) > MOST_VALUES else []
        room -= len(json.dumps({path: few}))
        if room < 0:
            return {**told, "...": "more than fits here"}
        told[path] = few[0] if len(few) == 1 else few
    return told


def _grouped(found: Iterator[tuple[str, Scalar]]) -> dict[str, list[Scalar]]:
    groups: dict[str, dict[tuple[type, Scalar], None]] = {}
    for path, value in found:
        groups.setdefault(path, {})[type(value), value] = None
    return {path: [value for _, value in values] for path, values in groups.items()}


# ---- at a site ----------------------------------------------------------------------------------------


def check_asked(
    site: str,
    tasks: Collection[str] | None,
    bounds: Mapping[str, Any],
    task: str,
    arguments: Mapping[str, Any],
    host: Host,
) -> None:
    """Refuse a task that is not in the site's file, and scalars outside of its bounds."""
    if tasks is None:
        raise ConfigError(NO_TASKS.format(name=site))
    if task not in tasks:
        raise WireError(
            f"{site} does not answer {task}: sites.{site}.tasks in its site.toml names what it answers; for another "
            "method its people put the tasks and bounds there that `solera deploy init` writes"
        )
    for path, value in scalars(arguments):
        bound = bounds.get(path)
        if bound == OWN:
            bound = host.roster[site].num_examples
        if bound is None or (bound != ANY and not _within(bound, value)):
            raise WireError(
                f"{site} does not answer {task} with {path} = {show(value)}: sites.{site}.bounds in its site.toml has "
                + ("no such line" if bound is None else show(bound))
            )


def _within(bound: Any, value: Scalar) -> bool:
    """True if a text or truth value is one of those in `bound`, or a number between the smallest and the largest."""
    known = bound if isinstance(bound, list) else [bound]
    if isinstance(value, bool | str):
        return any(type(k) is type(value) and k == value for k in known)
    numbers = [k for k in known if not isinstance(k, bool | str)]
    return bool(numbers) and min(numbers) <= value <= max(numbers)


# ---- for `solera deploy init` -------------------------------------------------------------------------


class Noting(Dry):
    """A dry-run engine that records the tasks that it is sent, with their scalars."""

    def __init__(self, roster: Roster):
        super().__init__(roster)
        self.tasks: set[str] = set()
        self.found: dict[str, dict[tuple[type, Scalar], None]] = {}
        self.not_own: set[str] = set()  # arguments that are not the number of the client's samples

    def _answer(self, call: Call) -> Reply:
        task, arguments = arguments_of(call)
        self.tasks.add(task.name)
        for path, value in scalars(arguments):
            self.found.setdefault(path, {})[type(value), value] = None
            if value != self.roster[call.client].num_examples:
                self.not_own.add(path)
        most_due(call)  # refuses replies without a limit
        return super()._answer(call)

    def bounds(self, sizes_vary: bool) -> dict[str, Any]:
        """The bounds of each argument, from the values that it had."""
        return {
            path: _bound(path, [v for _, v in values], sizes_vary) if path in self.not_own else OWN
            for path, values in sorted(self.found.items())
        }


def _bound(path: str, values: Sequence[Scalar], sizes_vary: bool) -> Any:
    others = sorted((v for v in values if isinstance(v, bool | str)), key=str)
    numbers = sorted(v for v in values if not isinstance(v, bool | str))
    if (numbers and numbers[-1] > LARGEST) or (others and all(SHA256.fullmatch(str(v)) for v in others)):
        return ANY
    # A value that varies and is no setting depends on training results, which are other numbers in the run.
    if "." not in path and len(numbers) > 1 and (sizes_vary or any(isinstance(v, float) for v in numbers)):
        numbers = [-LARGEST, LARGEST]
    known = [*others, *numbers[:1], *numbers[1:][-1:]]
    return known[0] if len(known) == 1 and known[0] not in (ANY, OWN) else known


def asked_by(config: Config) -> tuple[list[str], dict[str, Any]]:
    """The tasks that the run of a configuration sends to its sites, and the bounds of their arguments.

    The method goes through its rounds as in a dry run. No site's data is read.
    """
    prepare_scoring()
    sizes = {k: SIZES + i for i, k in enumerate(sorted(config.sites))}
    hellos = {k: Hello(k, "", n, n, config.run.seed, "", "", "") for k, n in sizes.items()}
    scenario = build_sites(config, hellos)
    dry = Noting(scenario.roster)
    rounds = max(ROUNDS, config.run.rounds)
    rehearse(scenario, config.method, dataclasses.replace(config.run, rounds=rounds), config.federation, dry)
    return sorted(dry.tasks), dry.bounds(bool(config.method.traits().bytes_vary))
