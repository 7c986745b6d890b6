"""A dry run: every exchange of a run and its bytes, without training or writing anything.

It is the loop of a run with the engine `dry`, which makes the clients' replies, and with trainings on the server that
take no steps (`numerics(dry=True)`). The data, the models and the public samples are those of the run.
"""

import dataclasses
import logging
from typing import Any

from ..core.accounting import LATE, LOST
from ..core.errors import RunError
from ..core.federation import FederationConfig, QuorumNotMet
from ..core.randomness import seed_from, seeded
from ..engines.dry import Dry
from ..method import Method, name_of
from ..place.placement import numerics
from ..scenario.scenario import Scenario
from .callbacks import Callback, Callbacks
from .config import Config, RunConfig, to_toml
from .facts import facts_of, stand_ins_of
from .loop import Loop, check_fit, check_quorum, check_stop_rule, federation_of, scenario_of, sole_run
from .record import WAYS, RoundRecord, Traffic
from .words import verdict

log = logging.getLogger("solera")


@dataclasses.dataclass(frozen=True)
class Rehearsal:
    """The bytes and models that a run will send and save."""

    method: str
    clients: int
    cohort: int
    rounds: list[Traffic]
    models: dict[str, dict[str, Any]]  # name -> architecture and bytes of its weights
    bounded: list[str]  # tasks for whose replies only an upper limit is known
    varies: str  # the reason why the bytes depend on training results; empty: they do not

    def total(self, way: str) -> int:
        """Bytes of the whole run, "down" or "up"."""
        return sum(sent.sent(way) for sent in self.rounds)

    def facts(self) -> dict[str, Any]:
        """All values, for `--json`."""
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


class _Sent(Callback):
    """Keeps the traffic of each round. Clients fail in a dry run only by the simulated clock. Any other failure means
    that zeros are invalid in a reply."""

    def __init__(self) -> None:
        self.rounds: list[Traffic] = []

    def round(self, record: RoundRecord) -> None:
        for f in record.failures:
            if f["reason"] != LOST and not f["reason"].startswith(LATE):
                raise RunError(
                    f"round {record.round}: a reply of zeros to {f['task']} is refused: {f['reason']}; give the "
                    "reply's type an example of a valid reply (`fill`, see solera.core.wire.sized)"
                )
        void = [e["reason"] for e in record.events if e["kind"] in ("round_empty", "finish_empty")]
        if void and not record.failures:
            raise QuorumNotMet(void[0])
        self.rounds.append(record.traffic)


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
    server, engine, sent = scenario.server, engine or Dry(scenario.roster), _Sent()
    check_fit(method, scenario)
    check_stop_rule(config, server)
    check_quorum(federation, len(scenario.roster))
    method = method.for_dry_run()
    patient = dataclasses.replace(federation, max_empty_rounds=config.rounds + 1)  # _Sent checks void rounds
    fed = federation_of(engine, server, method, patient)
    with sole_run(), numerics(dry=True) as held, seeded(seed_from(scenario.seed, "run")):
        state = Loop(method, fed, server, config, Callbacks([sent]), held)(0, None)
        models = {
            name: {"architecture": m.architecture, "bytes": sum(w.nbytes for w in m.weights.values())}
            for name, m in method.models(state).items()
        }
    cohort = federation.cohort(len(fed.clients))
    early = "run.stop may end the run before its last round" if config.stop.active else ""
    varies = "; ".join(filter(None, (method.traits().bytes_vary, early)))
    return Rehearsal(name_of(method), len(fed.clients), cohort, sent.rounds, models, sorted(engine.bounded), varies)
