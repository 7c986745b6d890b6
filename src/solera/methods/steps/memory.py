"""Students of earlier rounds as teachers (an option of FedDF's authors' code).

The global models that a round starts with are the students of the round before: they can teach without being kept.
Older ones are kept beside them in the method's state, under "NAME@1" (one round older), "NAME@2", ...
"""

from ...core.federation import Federation
from ...core.settings import NonNegativeInt, settings
from ...core.tensors import Weights
from ...scenario.server import Server
from ...train.teachers import Frozen, frozen

AGE = "@"  # no architecture has it in its name


@settings
class Memory:
    """What the server keeps of earlier rounds."""

    rounds: NonNegativeInt = 0  # of so many earlier rounds the students teach too, each like a client; 0: none


def current(M: dict[str, Weights]) -> dict[str, Weights]:
    """The global models, without those of earlier rounds."""
    return {A: w for A, w in M.items() if AGE not in A}


def with_past(
    teachers: dict[str, Frozen], M: dict[str, Weights], cfg: Memory, fed: Federation, server: Server
) -> dict[str, Frozen]:
    """The teachers, and the students of up to `cfg.rounds` earlier rounds. What the first round starts with is none."""
    past = {name: w for name, w in M.items() if _age(name) < min(cfg.rounds, fed.round)}
    if not past:
        return teachers
    models = frozen([(name.partition(AGE)[0], w) for name, w in past.items()], server.model)
    return teachers | {f"student-{name}": model for name, model in zip(past, models, strict=True)}


def remembered(M: dict[str, Weights], cfg: Memory) -> dict[str, Weights]:
    """What the next round's state keeps of this one's M, each a round older; the oldest is forgotten."""
    older = {name: _age(name) + 1 for name in M}
    return {f"{name.partition(AGE)[0]}{AGE}{age}": M[name] for name, age in older.items() if age < cfg.rounds}


def _age(name: str) -> int:
    """How many rounds before the last one a student was made."""
    return int(name.partition(AGE)[2] or 0)
