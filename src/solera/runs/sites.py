"""The two sides of a run whose clients are sites elsewhere: the site's host, and the server's scenario.

Both come from the same tables ([data], [public], [models], [sites.NAME], [run]). The server's file need not name a
site's data, and a site's file need not mention the other sites. A simulation of all sites with the same tables ends
with the same digest.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial

import torch

from ..core.errors import ConfigError
from ..core.plugins import architectures, is_path
from ..core.randomness import seed_from
from ..core.task import Data
from ..data import Dataset, load, make_public
from ..data.catalogue import SOURCES
from ..data.encodings import VOCABULARY
from ..data.site_data import Holding, SiteConfig, read_site, read_source
from ..data.spec import Spec
from ..data.transforms import check_steps
from ..engines import default_workers
from ..models import check_output
from ..scenario.host import Hello, Remote, SiteHost, check_hellos, form_digest, layout_digest
from ..scenario.scenario import DataConfig, Scenario, builder_of, share_for_sites, tokenizer_of
from ..scenario.server import Server
from .config import Config

TEXTS = "texts"  # data.name of the server's own texts
TABLE = "table"  # data.name of the server's own samples, where they are in a table


def build_sites(config: Config, hellos: Mapping[str, Hello] | None = None) -> Scenario:
    """The scenario of the sites in a configuration. With `hellos`, that of a server whose sites are elsewhere."""
    data, models, seed = config.data, config.models, config.run.seed
    sites: dict[str, tuple[Holding | Remote, str]] = {}
    for k, site in sorted(config.sites.items()):
        model = _model_of(k, site)
        if hellos is None:
            own = spec_of_site(config, k)
            sites[k] = (read_site(k, site, own, share_for_sites(data.client_test), seed), model)
        else:
            sites[k] = (Remote(hellos[k].num_examples, hellos[k].num_test), model)
    return Scenario(
        server_data(data, stated_spec(data), seed),
        public=config.public,
        sites=sites,
        server=models.server,
        validation=data.validation,
        client_test=share_for_sites(data.client_test),
        augment=data.augment,
        norm=models.norm,
        head=models.head,
        options=models.options,
        weights=models.weights,
        lora=models.lora,
        seed=seed,
        workers=config.engine.workers or default_workers(),
    )


def site_host(config: Config, name: str) -> SiteHost:
    """The `Host` of the site `name`, built only from its own table and data; `.hello()` describes it to the server.

    With `public.where = "server"` its `public` is None until the server's arrives: `host.public = ...`.
    """
    _check_deployable(config)
    if name not in config.sites:
        raise ConfigError(f"there is no [sites.{name}] in this configuration; it has {', '.join(config.sites)}")
    site, data, public, seed = config.sites[name], config.data, config.public, config.run.seed
    models, model = config.models, _model_of(name, site)
    spec = spec_of_site(config, name)
    A = next(iter(architectures([model])))
    holding = read_site(name, site, spec, share_for_sites(data.client_test), seed)
    check_steps("data.augment", data.augment, holding.train.inputs, f"site {name}")
    elsewhere = public.source == "none" or public.where == "server"
    samples = None if elsewhere else make_public(public, spec, torch.empty(0), seed_from(seed, "public"))
    made = builder_of(A, model, models.norm, models.head, spec, models.options, models.weights, models.lora)
    server = Server({A: made}, [A], seed, spec.classes)
    check_output(server.template(A), spec.shape, spec.classes, A, bool(spec.vocabulary))
    return SiteHost(name, holding, spec, A, partial(server.template, A), samples, data.augment, seed)


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
    expected = {}
    theirs = scenario.public.digest if public and scenario.public is not None else ""
    for A in scenario.server.architectures:
        spec, layout = scenario.spec_for(A), layout_digest(scenario.server.template(A))
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
    return stated_spec(config.data).read_by(tokenizer_of(model, config.models.options))


def stated_spec(data: DataConfig) -> Spec:
    """The spec of samples, from the configuration alone: no site's data is read."""
    if data.task != "classification":
        raise ConfigError(f"data.task = {data.task!r} with [sites]: sites learn to classify; leave data.task out")
    info = None if is_path(data.name) else SOURCES.get(data.name)
    text = info is not None and info.is_text
    shape = tuple(data.shape) or ((data.length,) if text else info.shape if info else ())
    classes = len(data.classes) or (info.classes if info else 0)
    for key, value, example in (("shape", shape, "[3, 32, 32]"), ("classes", classes, '["benign", "malignant"]')):
        if not value:
            raise ConfigError(
                f"data.{key} is missing: sites cannot find it in each other's data; for example {example}"
            )
    mean, std = (data.mean, data.std) if data.mean or not info else (info.mean or (), info.std or ())
    if text and shape != (data.length,):
        raise ConfigError(
            f"data.shape = {list(shape)}: of {data.name}, a sample is the first {data.length} tokens of a text; leave "
            "data.shape out, and set data.length"
        )
    vocabulary = VOCABULARY if text else 0
    names = tuple(data.classes) or (info.class_names if info else ())
    return Spec(data.name, shape, classes, tuple(mean), tuple(std), vocabulary, names)


def server_data(data: DataConfig, spec: Spec, seed: int) -> Dataset:
    """The server's own samples, on which models are evaluated."""
    if data.path is not None and data.name in ("folder", TABLE):
        train, test = read_source(data.path, spec, (), SiteConfig.label_column, "data.path")
        if test is None and data.validation:
            raise ConfigError(f"data.validation = {data.validation}: {data.path} has no test split of its own")
        found = Dataset(
            data.name, spec.classes, vocabulary=spec.vocabulary, train=train.data, test=(test or train).data
        )
    else:
        found = load(
            data.name, data.path, data.train_size, data.test_size, seed, data.length, data.image_size,
            text_column=data.text_column, pair_column=data.pair_column, label_column=data.label_column,
        )  # fmt: skip
        found = _as_stated(found, data, spec)
    if found.vocabulary and not spec.vocabulary:
        raise ConfigError(
            f"data.name = {data.name!r} has texts, but sites cannot know that: use a named data set of texts, or "
            f"data.name = {TEXTS!r} with a table at data.path"
        )
    if (found.shape, found.classes, found.vocabulary) != (spec.shape, spec.classes, spec.vocabulary):
        raise ConfigError(
            f"data.name = {data.name!r} has samples of shape {found.shape} in {found.classes} classes; data.shape and "
            f"data.classes say {spec.shape} in {spec.classes}"
        )
    return dataclasses.replace(found, mean=spec.mean, std=spec.std, class_names=spec.class_names or found.class_names)


def _as_stated(found: Dataset, data: DataConfig, spec: Spec) -> Dataset:
    """The classes of a table in the order of data.classes: a table has only the names of the classes in it."""
    if data.name != TEXTS or found.classes > spec.classes:
        return found
    numbers = spec.numbers(found.class_names or range(found.classes), f"data.path = {data.path!r}")
    train, test = (Data(part.inputs, numbers[part.labels]) for part in (found.train, found.test))
    return dataclasses.replace(found, train=train, test=test, classes=spec.classes, class_names=spec.class_names)


def _model_of(name: str, site: SiteConfig) -> str:
    if site.model is None:
        raise ConfigError(f"sites.{name}.model is missing: name its architecture (solera ls models)")
    return site.model
