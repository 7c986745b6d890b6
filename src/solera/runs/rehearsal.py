"""A dry run: every exchange of a run and its bytes, without training or writing anything.

The method runs its own code for all rounds, on the real data, models and public samples. `engines.dry` makes the
clients' replies, and training on the server takes no steps (`numerics(dry=True)`).
"""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

from ..core.accounting import LATE, LOST
from ..core.errors import RunError
from ..core.federation import Federation, FederationConfig, QuorumNotMet
from ..core.randomness import seed_from, seeded
from ..engines.dry import Dry
from ..method import Method, name_of
from ..place.placement import numerics
from ..scenario.scenario import Scenario
from .config import Config, RunConfig, to_toml
from .facts import facts_of, stand_ins_of
from .loop import check_fit, check_quorum, federation_of, scenario_of, sole_run
from .measure import measure_own, traffic
from .record import WAYS, Traffic
from .stand_ins import verdict

log = logging.getLogger("solera")


@dataclasses.dataclass(frozen=True)
class Rehearsal:
    """What a run will send and save."""

    method: str
    clients: int
    cohort: int
    rounds: list[Traffic]
    models: dict[str, dict[str, Any]]  # name -> architecture and bytes of its weights
    bounded: list[str]  # tasks for whose replies only an upper limit is known
    varies: str  # why the bytes depend on what is learned; empty: they do not

    def total(self, way: str) -> int:
        """Bytes of the whole run, "down" or "up"."""
        return sum(sent.sent(way) for sent in self.rounds)

    def facts(self) -> dict[str, Any]:
        """Everything, for programs."""
        return {
            "dry_run": True,
            "method": self.method,
            "clients": self.clients,
            "cohort": self.cohort,
            "bytes": {way: self.total(way) for way in WAYS},
            "exact": not (self.bounded or self.varies),
            "at_most": self.bounded,
            "varies": self.varies,
            "rounds": [{"round": t, "bytes": sent.bytes} for t, sent in enumerate(self.rounds)],
            "models": self.models,
        }


def rehearse_config(config: Config) -> Rehearsal:
    """Rehearse the run of a configuration."""
    scenario = scenario_of(config)
    facts = facts_of(scenario, config.method, config.federation)
    if found := stand_ins_of(config.run.stand_ins, to_toml(config), facts):
        log.warning(verdict(found))
    return rehearse(scenario, config.method, config.run, config.federation)


def rehearse(
    scenario: Scenario, method: Method, config: RunConfig, federation: FederationConfig, engine: Dry | None = None
) -> Rehearsal:
    """Go through all rounds of a run. It refuses what the run would refuse, and writes nothing."""
    check_fit(method, scenario)
    check_quorum(federation, len(scenario.roster))
    method = method.for_dry_run()
    engine, server, sent = engine or Dry(scenario.roster), scenario.server, []
    fed = federation_of(engine, server, method, federation)
    with sole_run(), numerics(dry=True), seeded(seed_from(scenario.seed, "run")):
        state = method.init(fed, server)
        for t in range(config.rounds):
            fed.begin(t)
            server.begin()
            last = t == config.rounds - 1
            with _every_reply_counts(fed):
                state = method.round(state, fed, server)
                if last:
                    state = method.finish(state, fed, server)
                sent.append(traffic(fed))  # before own models are scored, like in a run
                if last or (t + 1) % config.eval_every == 0:
                    measure_own(method, state, fed, server, config.eval_clients)
        models = {
            name: {"architecture": m.architecture, "bytes": sum(w.nbytes for w in m.weights.values())}
            for name, m in method.models(state).items()
        }
    cohort = federation.cohort(len(fed.clients))
    early = "run.stop may end the run before its last round" if config.stop.active else ""
    varies = "; ".join(filter(None, (method.traits().bytes_vary, early)))
    return Rehearsal(name_of(method), len(fed.clients), cohort, sent, models, sorted(engine.bounded), varies)


@contextlib.contextmanager
def _every_reply_counts(fed: Federation) -> Iterator[None]:
    """No client can fail in a dry run, except in simulated time: a refused reply means that zeros are invalid in it."""
    try:
        yield
    except QuorumNotMet:
        if not fed.failures:
            raise
    for f in fed.failures:
        if f["reason"] == LOST or f["reason"].startswith(LATE):
            continue
        raise RunError(
            f"round {fed.round}: a reply of zeros to {f['task']} is refused: {f['reason']}; give the reply's type an "
            "example of a valid reply (`fill`, see solera.core.wire.sized)"
        )
