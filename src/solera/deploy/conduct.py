"""The server's program: queries the sites, then runs the method on them as on any other clients."""

import contextlib
import dataclasses
import json
import logging
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from flwr.app import Message

from ..core import __version__
from ..core.calls import text_in
from ..core.errors import ConfigError, SoleraError
from ..core.federation import QuorumNotMet
from ..core.plugins import code_allowed
from ..core.tensors import weights_of
from ..core.wire import Limits, WireError, digest, safe_name
from ..engines.engine_settings import FlowerConfig
from ..engines.states import StatesElsewhere
from ..place import fingerprint as numeric
from ..place.devices import compute_of
from ..runs.callbacks import Callback
from ..runs.config import Config, load_config, to_toml
from ..runs.display import IN_THE_CLEAR
from ..runs.loop import Result, lent_by, simulate
from ..runs.record import RoundRecord
from ..runs.sites import server_of_sites
from ..runs.words import human_bytes, percent
from ..scenario.host import Hello
from ..scenario.scenario import Scenario
from .flower import PROTOCOL, QUERY, Flower, Nodes, pack, unpack
from .journal import ENDED
from .keys import fingerprint

log = logging.getLogger("solera")
SITES = "sites.json"  # in a run directory: the sites' hellos when the run began; never changed
WHO_S = 300.0  # timeout for a node to give its name


def conduct(grid: Any, folder: Path, name: str, file: str, insecure: bool = False) -> Result:
    """Begin the run `name` of the server in `folder`, or resume it. `file` is a configuration in that folder.

    `insecure`: nodes have no keys, and the names that they say are believed.
    """
    home = folder / "runs" / safe_name(name, "run name")
    if Path(file).name != file:
        raise ConfigError(f"config = {file[:100]!r}: the name of a file in the server's folder")
    try:
        with code_allowed(folder):  # the user who starts the server named this code
            config = load_config(folder / file, trusted=True)
            return _conduct(grid, folder, home, config, insecure)
    except SoleraError as e:
        log.error("the run %s ends: %s", name, e, extra=ENDED)
        raise
    except BaseException:
        log.exception("the run %s ends", name, extra=ENDED)
        raise


def _conduct(grid: Any, folder: Path, home: Path, config: Config, insecure: bool) -> Result:
    if not isinstance(config.engine, FlowerConfig):
        raise ConfigError("engine.name must be 'flower' in the configuration of a deployment")
    if not config.sites:
        raise ConfigError("there are no sites: a deployment needs a table [sites.NAME] for each of them")
    sites = _known_by_key(folder, config)

    def site_of(key: bytes) -> str | None:
        with contextlib.suppress(ConfigError):  # a node without a key, on a server without authentication
            return sites.get(fingerprint(key, "a node's key"))
        return None

    nodes = Believed(grid, set(config.sites)) if insecure else Nodes(grid, site_of)
    engine = Flower(grid, nodes, config.engine, home.name)
    seed, compute = config.run.seed, compute_of(config.engine)
    said = engine.greet(list(config.sites), seed)
    hellos = _enrolled(home, {k: _hello(k, facts) for k, facts in said.items()}, config)
    config = dataclasses.replace(config, sites={k: config.sites[k] for k in hellos})
    scenario = server_of_sites(config, hellos)
    _compare_versions(scenario, said, compute.portable)
    _share_public(engine, scenario, config, said)
    engine.enrolled = scenario.roster
    engine.hellos = {k: h.digest for k, h in hellos.items()}
    return simulate(
        scenario,
        config.method,
        home,
        config.run,
        config.federation,
        config.engine,
        resume=True,
        callbacks=[_Log()],
        track=config.track,
        config_text=to_toml(config),
        command=f"solera deploy submit --name {home.name}",
        reach=lambda states: engine,
        states=StatesElsewhere(home / "clients"),
    )


class Believed(Nodes):
    """Nodes without keys, on a server without TLS: each is asked once for its name, which is not checked."""

    def __init__(self, grid: Any, sites: Collection[str]):
        super().__init__(grid, lambda key: None)
        self.sites = sites
        self._asked: dict[str, int] = {}  # pending messages, with the node
        self._names: dict[int, str | None] = {}

    def present(self) -> dict[str, int]:
        """The nodes that have answered so far. Does not wait."""
        here = [node.node_id for node in self.grid.get_nodes()]
        new = [n for n in here if n not in self._names and n not in self._asked.values()]
        if new:
            who = pack({"protocol": PROTOCOL, "what": "who"})
            sent = self.grid.push_messages([Message(who, n, QUERY, ttl=WHO_S) for n in new])
            self._asked |= {str(name): n for name, n in zip(sent, new, strict=True) if name}
        for name, node in list(self._asked.items()):
            for reply in self.grid.pull_messages([name]):
                del self._asked[name]
                self._names[node] = None if reply.has_error() else self._named(reply)
        return {k: n for n in here if (k := self._names.get(n)) is not None}

    def _named(self, reply: Any) -> str | None:
        try:
            name = text_in(unpack(reply.content, Limits())[0], "site")
        except WireError as e:
            log.warning("a node does not say its name: %s", e)
            return None
        return name if name in self.sites else None


def _known_by_key(folder: Path, config: Config) -> dict[str, str]:
    """The sites by their public keys."""
    found: dict[str, str] = {}
    for k, site in config.sites.items():
        if site.key is None:
            raise ConfigError(f"sites.{k}.key is missing: the file of its public key, such as keys/{k}.pub")
        file = folder / site.key
        try:
            key = fingerprint(file.read_bytes(), str(file))
        except OSError as e:
            raise ConfigError(f"sites.{k}.key = {site.key!r}: {e.strerror}") from None
        if key in found:
            raise ConfigError(f"sites {found[key]} and {k} have the same key: each site needs its own")
        found[key] = k
    return found


def _hello(k: str, facts: Mapping[str, Any]) -> Hello:
    """The hello of a site, under the name that belongs to its key."""
    told: dict[str, Any] = {f.name: facts.get(f.name) for f in dataclasses.fields(Hello)}
    for name, kind in get_type_hints(Hello).items():
        if type(told[name]) is not kind or len(str(told[name])) > 200:
            raise WireError(f"{k}: {name} = {str(told[name])[:40]!r}")
    if not 0 <= told["num_examples"] < 1 << 53:
        raise WireError(f"{k}: num_examples = {told['num_examples']}")
    return Hello(**{**told, "name": k})


def _enrolled(home: Path, said: Mapping[str, Hello], config: Config) -> dict[str, Hello]:
    """The sites of this run, with their hellos from when it began."""
    file = home.parent / f".{home.name}.{SITES}"
    if file.is_file():
        first = {k: Hello(**h) for k, h in json.loads(file.read_text()).items()}
        for k, h in said.items():
            if k in first and h != first[k]:
                raise ConfigError(
                    f"site {k} is not as it was when the run began (it had {first[k].num_examples} examples and the "
                    f"model {first[k].architecture}, now {h.num_examples} and {h.architecture}): begin a new run"
                )
        return first
    assert isinstance(config.engine, FlowerConfig)
    if missing := sorted(set(config.sites) - set(said)):
        if config.engine.absent == "wait" or not said:
            raise QuorumNotMet(
                f"{', '.join(missing)} did not say hello within {config.engine.wait_s:g} s; submit again"
            )
        log.warning("the run begins without %s, as engine.absent says", ", ".join(missing))
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps({k: dataclasses.asdict(h) for k, h in said.items()}))
    draft.replace(file)
    return dict(said)


def _compare_versions(scenario: Scenario, said: Mapping[str, Mapping[str, Any]], portable: bool) -> None:
    """Warn about sites whose software differs from the server's."""
    for k, facts in said.items():
        if facts.get("solera") != __version__:
            log.warning("%s runs solera %s, the server %s", k, str(facts.get("solera"))[:40], __version__)
        template = scenario.server.template(scenario.roster[k].architecture)
        if facts.get("weights") != digest(weights_of(template)):
            log.warning(
                "%s initialises its model to other numbers (torch %s there): the run is not repeatable to the bit",
                k, str(facts.get("torch"))[:40],
            )  # fmt: skip

    ours = numeric.fingerprint(portable)
    if apart := {k: theirs for k, facts in said.items() if (theirs := str(facts.get("fingerprint"))[:16]) != ours}:
        log.warning(
            "sites that compute other bits than the server (fingerprint %s): %s; the run is repeatable to the bit only "
            "on these machines", ours, ", ".join(f"{k} ({theirs})" for k, theirs in apart.items()),
        )  # fmt: skip


def _share_public(engine: Flower, scenario: Scenario, config: Config, said: Mapping[str, Mapping[str, Any]]) -> None:
    """Send the public samples, once, to the sites that need them."""
    public, message = scenario.public, lent_by(config.method, scenario.server)
    if public is None or message is None:
        return
    if config.public.source in ("noise", "generator"):
        raise ConfigError(
            f"public.where = 'server': samples of source {config.public.source!r} are made, not sent; set "
            "public.where = 'everywhere', and [public] in each site's file"
        )
    engine.public = public.digest
    asked = engine.greet(list(said), scenario.seed)
    lacking = sorted(set(scenario.roster) - {k for k, facts in asked.items() if facts.get("has_public") is True})
    if lacking:
        log.info("the public samples, %s, go to %s", human_bytes(message.size * len(lacking)), ", ".join(lacking))
        engine.deliver(lacking, message)


class _Log(Callback):
    """The run in the server's log."""

    def begin(self, facts: Mapping[str, Any], before: Iterable[RoundRecord]) -> None:
        log.info(
            "%s, %s rounds from %s on, %s sites", *(facts[k] for k in ("method", "rounds", "start_round", "clients"))
        )
        if facts["replies"] == "means":
            log.info("%s", IN_THE_CLEAR)

    def progress(self, what: str, done: int, of: int) -> None:
        if done:
            log.info("%s: %d of %d sites have answered", what, done, of)

    def saved(self, record: RoundRecord) -> None:
        scores = ", ".join(f"{name} {percent(value)}" for name, value in list(record.accuracies().items())[:6])
        log.info("round %d: %s; %s moved", record.round, scores or "not scored", human_bytes(record.traffic.sent()))

    def warn(self, text: str) -> None:
        log.warning("%s", text)

    def end(self, summary: Mapping[str, Any] | None) -> None:
        if summary is not None:
            log.info("the run has ended, digest %s", summary["digest"], extra=ENDED)
