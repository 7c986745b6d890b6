"""The two sides of a run whose clients are sites elsewhere: the site's host, and the server's scenario.

Both come from the same tables ([data], [public], [models], [sites.NAME], [run]). The server's file need not name a
site's data, and a site's file need not mention the other sites. A simulation of all sites with the same tables ends
with the same digest.
"""

import dataclasses
from collections.abc import Mapping

import torch
from torch import nn

from ..core.errors import ConfigError
from ..core.plugins import architectures
from ..core.randomness import seed_from
from ..data import make_public
from ..data.dataset import Spec
from ..data.site_data import Holding, SiteConfig, read_site
from ..data.transforms import check_steps
from ..engines import default_workers
from ..models import check_output
from ..models.factory import ModelFactory, tokenizer_of
from ..scenario.host import ClientHost, Hello, Remote, View, check_hellos, form_digest, layout_digest
from ..scenario.scenario import Scenario
from ..scenario.server import initialised
from ..scenario.task_data import share_for_sites, stated_spec
from .config import Config


def build_sites(config: Config, hellos: Mapping[str, Hello] | None = None) -> Scenario:
    """The scenario of the sites in a configuration. With `hellos`, that of a server whose sites are elsewhere."""
    sites: dict[str, tuple[Holding | Remote, str]] = {}
    share, seed = share_for_sites(config.data.client_test), config.run.seed
    for k, site in sorted(config.sites.items()):
        model = _model_of(k, site)
        if hellos is None:
            sites[k] = (read_site(k, site, spec_of_site(config, k), share, seed), model)
        else:
            sites[k] = (Remote(hellos[k].num_examples, hellos[k].num_test), model)
    workers = config.engine.workers or default_workers()
    return Scenario(config.data, config.models, public=config.public, sites=sites, seed=seed, workers=workers)


def site_host(config: Config, name: str, model: nn.Module | None = None) -> ClientHost:
    """The `Host` of the site `name`, built only from its own table and data; `.hello()` describes it to the server.

    With `public.where = "server"` its `public` is None until the server's arrives: `host.public = ...`. `model` is
    that of `site_model`, where it was built before.
    """
    _check_deployable(config)
    if name not in config.sites:
        raise ConfigError(f"there is no [sites.{name}] in this configuration; it has {', '.join(config.sites)}")
    site, data, public, seed = config.sites[name], config.data, config.public, config.run.seed
    spec = spec_of_site(config, name)
    held = read_site(name, site, spec, share_for_sites(data.client_test), seed)
    check_steps("data.augment", data.augment, held.train.inputs, f"site {name}")
    elsewhere = public.source == "none" or public.where == "server"
    samples = None if elsewhere else make_public(public, spec, torch.empty(0), seed_from(seed, "public"))
    A = next(iter(architectures([_model_of(name, site)])))
    made = site_model(config, name) if model is None else model
    train, test, augment = View(held.train), View(held.test), tuple(data.augment)
    return ClientHost(name, spec, train, test, A, lambda: made, samples, augment, seed, held.texts)


def site_model(config: Config, name: str) -> nn.Module:
    """The model of the site `name` as the run's seed initialises it."""
    model, spec = _model_of(name, config.sites[name]), spec_of_site(config, name)
    A = next(iter(architectures([model])))
    factory = ModelFactory(spec, config.models, {A: model})
    made = initialised(lambda: factory.make(A), config.run.seed, A)
    check_output(made, spec.shape, spec.classes, A, bool(spec.vocabulary))
    return made


def server_of_sites(config: Config, hellos: Mapping[str, Hello]) -> Scenario:
    """The server's side of a run whose sites are elsewhere: `.server`, `.test` and `.roster` for `runs.loop`.

    The clients are the sites in the server's own configuration. `hellos`, by authenticated name, give their sizes. A
    site that is configured for another run is refused by name.
    """
    _check_deployable(config)
    if missing := [k for k in config.sites if k not in hellos]:
        raise ConfigError(f"site {missing[0]} has not said hello")
    scenario = build_sites(config, hellos)
    check_hellos(expected_hellos(scenario, config.public.where == "everywhere"), hellos)
    return scenario


def expected_hellos(scenario: Scenario, public: bool) -> dict[str, Hello]:
    """The hello that each site must send to belong to this run. `public`: it must hold the public data itself."""
    theirs = scenario.public.digest if public and scenario.public is not None else ""
    expected = {}
    for A, spec in scenario.specs.items():
        layout = layout_digest(scenario.server.template(A))
        expected[A] = Hello("", A, 0, 0, scenario.seed, form_digest(spec), layout, theirs, spec.tokenizer)
    return {
        k: dataclasses.replace(expected[info.architecture], name=k, num_examples=info.num_examples)
        for k, info in scenario.roster.items()
    }


def _check_deployable(config: Config) -> None:
    if not config.sites:
        raise ConfigError("there are no sites in this configuration: write [sites.NAME] for each")


def spec_of_site(config: Config, name: str) -> Spec:
    """The spec of the samples of site `name`, whose texts are read with its own model's tokenizer."""
    model = _model_of(name, config.sites[name])
    return stated_spec(config.data).read_by(tokenizer_of(model, config.models))


def _model_of(name: str, site: SiteConfig) -> str:
    if site.model is None:
        raise ConfigError(f"sites.{name}.model is missing: name its architecture (solera ls models)")
    return site.model
