"""Write the parts of docs/ that are generated from the code, so that they stay up to date.

    python scripts/make_reference.py           writes them
    python scripts/make_reference.py --check   only lists outdated pages (exit code 1); tests/docs does the same

The whole of `docs/configuration.md` is generated. In other pages it is the text between the marks
`<!-- generated: NAME -->` and `<!-- end -->`: change the code or this script, not that text.

The meaning of a setting is the comment beside its field in the code. MEANINGS has it where there is no comment, or
where a user needs more than a reader of the code.
"""

import argparse
import ast
import dataclasses
import inspect
import io
import re
import sys
import textwrap
import tokenize
import typing
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

import solera.methods  # noqa: F401  (registers them)
from solera.core.errors import ConfigError
from solera.core.settings import OFF, Slot, hints, optional, strip, words
from solera.data import SOURCES
from solera.data.site_data import SiteConfig
from solera.lab.papers import PAPERS, load_paper, paper_names
from solera.lab.reproduce import needs
from solera.method import METHODS, Method, Traits, described, name_of
from solera.models import MODELS, build, size_of
from solera.runs.config import TABLES, load_config, recipe_names, recipe_text

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"(<!-- generated: ([a-z -]+) -->\n).*?(<!-- end -->)", re.DOTALL)
OF_US = "solera.methods."  # methods of users (or of tests) are not part of the documentation

MEANINGS = {
    "run.seed": "fixes the partition, the initial weights and every random choice of the run",
    "run.rounds": "communication rounds",
    "run.name": "shown, and part of the run directory's default name; default: the recipe's name",
    "run.eval_clients": "how many clients' personal models are scored (methods with personal models); 0: none",
    "run.stand_ins": "of a run for a paper's row: settings that are not the paper's, with the paper's values; see "
    "[stand-ins](recipes.md#stand-ins)",
    "data.name": "a [named data set](data.md), a hub id `owner/name` or a [path](plug-ins.md)",
    "data.path": "the folder to read it from; default: the [usual places](data.md#where-a-set-is-looked-for)",
    "data.train_size": "a balanced sample of this size instead of the whole training set",
    "data.test_size": "a balanced sample of this size instead of the whole test set",
    "partition.kind": "how the training samples are divided, see [partitions](data.md#partitions)",
    "partition.clients": "number of clients, K; default: 20; kind `user`: all users, or a random sample of so many",
    "partition.alpha": "of the Dirichlet draws (kinds `dirichlet` and `quantity`): small = skewed, large = equal",
    "partition.variant": "which of the [four Dirichlet partitions](data.md#partitions) (kind `dirichlet`)",
    "partition.fraction": "share of its samples that each client keeps: less local data, the same partition",
    "partition.classes_per_client": "kind `classes`: every client holds samples of exactly so many classes",
    "partition.min_size": "fewest samples of a client (kinds `iid`, `quantity`, `classes` and variant `class`); kind "
    "`user`: users with fewer are left out",
    "public.source": "where the public samples come from, see [public data](data.md#public-data)",
    "public.name": "source `dataset`: its name, hub id or [path](plug-ins.md)",
    "public.path": "source `dataset`: the folder to read it from; source `generator`: its file",
    "public.size": "number of samples. held-out: taken out of the training set (default: a fifth of it); dataset: kept "
    "(default: all); noise and generator: generated (no default)",
    "public.classes": "only samples of these classes of their own data set: a list of numbers, or "
    "[a named list](data.md#public-data)",
    "public.labels": "keep the labels, for methods that need labelled public data",
    "data.augment": "random changes of clients' training images at each step, in this order, see "
    "[augmentation](data.md#augmentation)",
    "public.augment": "random changes of public images, in this order: once, or at each step (`fresh`)",
    "public.fresh": "new random changes (and new noise or generated images) at each step, not only once",
    "data.mean": "normalisation constants, one per channel on the scale 0 to 1; default: those of the data set, or of "
    "its training images",
    "data.std": "as many as `mean`: pixels become (x/255 - mean) / std",
    "data.shape": "with sites: the shape of one sample, which no site can find in the others' data; default: that of "
    "the named data set",
    "data.classes": "with sites: the names of the classes, in the order of their numbers; default: the numbers of the "
    "named data set's",
    "public.where": "who holds the public inputs before the run: every client has its own copy, or the server sends it "
    "to each client once",
    "public.noise": "source `noise`: uniform in [0, 1], or Gaussian, rescaled to [0, 1] in each batch",
    "models.clients": "architectures by name or [path](plug-ins.md), dealt to the clients; repeat one to give it more "
    "clients",
    "models.server": "the architecture of the server's own model, for methods that train one; a name or a path",
    "models.options": "a table for each architecture, see [options](models.md#options-of-one-architecture)",
    "models.norm": "normalisation layers of the architectures that have such layers",
    "models.head": "`shared`: one representation layer of the same shape in every model, see [heads](models.md#heads)",
    "models.assign": "`even`: in turn; `random`: each client draws one",
    "federation.min_replies": "with fewer valid replies an exchange, and so the round, is void",
    "federation.max_empty_rounds": "stop (exit code 5, resumable) after so many void rounds in a row",
    "engine.name": "`inprocess`, `threads`, `processes`, [`ray`](howto/ray.md), or [your own](own-engine.md), which "
    "has its own settings; "
    "`auto`: `inprocess` with one worker; with more, `processes` on Linux and `threads` elsewhere",
    "engine.workers": "clients at once; 0: one for each core, or `per_device` for each accelerator",
    "engine.device": '`"cpu"`, `"cuda"` (all that are visible), `"cuda:0,1"` or `"mps"`; `"auto"`: the CPU; '
    "see [on a GPU](howto/gpu.md)",
    "engine.per_device": "clients at once on one accelerator, as far as its memory allows",
    "engine.precision": "of products on an accelerator; `bf16` is mixed precision",
    "engine.deterministic": "on an accelerator: use only algorithms that repeat their bits",
    "engine.resident": "share of an accelerator's memory for data that stays there",
    "engine.portable": "[the same bits on any x86 processor](reliability.md#on-any-x86-processor) with AVX2, slower",
    "Local.epochs": "passes over the client's data",
    "Local.steps": "minibatches, instead of epochs",
    "Local.batch": "samples in a minibatch; a client with fewer uses all of them",
    "Local.lr": "learning rate, at the beginning of every training",
    "Local.momentum": "of SGD",
    "Local.weight_decay": "L2 penalty inside the optimizer",
    "Local.optimizer": "a new one for every training: its state is not kept between rounds",
    "Distill.steps": "minibatches of public samples; 0 turns distillation off, if the method allows it",
    "Distill.batch": "public samples in a minibatch",
    "Distill.optimizer": "a new one for every distillation",
    "Distill.lr": "learning rate at the first step",
    "Distill.momentum": "of SGD",
    "Distill.weight_decay": "L2 penalty inside the optimizer",
    "Distill.schedule": "`cosine` ends at 0 with the last step",
    "Distill.temperature": "T of the softmax on both sides",
    "Distill.patience": 'stop that many steps after the best evaluation on the validation set; "none": never',
    "Distill.student_norm": "BatchNorm statistics of the student: `train` has them follow the public samples",
    "*.average": "weighted by number of examples, or equal weights",  # for methods without an entry of their own
    "*.ensemble": "how the teachers' predictions are combined",
    "*.include_average": "the average of the clients' models is a teacher, too",
    "*.include_clients": "the clients' models are teachers, too",
    "*.kind": "which of them",
    "*.posterior": "the distribution around the clients' models from which teachers are drawn",
    "*.samples": "how many are drawn each round",
    "*.save_ensemble": "keep the ensemble's models, and save them with the others",
    "*.rule": "how the models' predictions are combined",
    "*.report_ensemble": "evaluate the ensemble each round (costs a forward pass of each model)",
    "fedprox.mu": "weight of the proximal term mu/2 ||w - w_t||^2",
    "fedprox.straggler_fraction": "share of the cohort that does a random part of the epochs (or steps): at least one, "
    "at most one less than all",
    "fedavgm.momentum": "beta of the server's momentum",
    "scaffold.server_lr": "step size of the server, eta_g",
    "scaffold.allow_momentum": "let option II run with an optimizer other than plain SGD, which it assumes",
    "Robust.average": "as above, or the median of each number, or a rule that tolerates `max_byzantine` clients, see "
    "[robustness](robustness.md)",
    "Robust.drop_threshold": "of `drop_worst`: minimum of validation accuracy, in multiples of chance",
    "Robust.drop_outliers": "if `drop_worst` drops no client: drop those far below the others",
    "Several.parts": "a list of tables `[[method.teaching.parts]]`, each of a kind of its own",
}


# ---- facts about dataclasses ------------------------------------------------------------------------


def comments_of(cls: type) -> dict[str, str]:
    """The comment at the end of each field's line."""
    source = textwrap.dedent(inspect.getsource(cls))
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    at_line = {
        token.start[0]: token.string.lstrip("# ").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    return {
        node.target.id: at_line[node.end_lineno]
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.end_lineno in at_line
    }


def inherited_comments(cls: type) -> dict[str, str]:
    """The same, fields of base classes included; those of the class itself win."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        found |= comments_of(base) if dataclasses.is_dataclass(base) else {}
    return found


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The default of a dataclass field."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def is_table(value: Any) -> bool:
    """Whether a setting is a table of settings itself."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def toml(value: Any) -> str:
    """A value as TOML writes it."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        return f'`"{value}"`'
    if isinstance(value, list | tuple):
        return "`[" + ", ".join(toml(v).strip("`") for v in value) + "]`"
    return f"`{value}`"


def takes(kind: Any) -> str:
    """What a setting takes, with its range: the words of the errors, without an article and with choices as code."""
    inner = strip(kind)
    if typing.get_origin(inner) is Literal:
        text = ", ".join(f"`{a}`" for a in typing.get_args(inner))
    else:
        text = words(kind).removesuffix(f' (or "{OFF}")').removeprefix("an ").removeprefix("a ")
    return f'{text}, or "{OFF}"' if optional(kind) else text


def cell(text: str) -> str:
    """Text that does not end its cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join("| " + " | ".join(cell(c) for c in line) + " |\n" for line in lines)


def settings(cls: type, where: str) -> list[tuple[str, ...]]:
    """A row for each setting: key, default, what it takes, what it means. `where` is the first part of MEANINGS."""
    kinds, said = hints(cls), inherited_comments(cls)
    rows = []
    for f in dataclasses.fields(cls):
        if not f.init:
            continue
        value = default_of(f)
        meaning = MEANINGS.get(f"{where}.{f.name}") or said.get(f.name) or MEANINGS.get(f"*.{f.name}", "")
        if isinstance(value, Slot):
            slot = first_kind(value)
            kinds_of = ", ".join(f"`{kind}`" for kind in slot_kinds(slot))
            said_of = f"{meaning}; {other_defaults('method', f.name, value)}"
            rows.append((f"`{f.name}`", f"`{value.kind}`", f"{link(slot)}: {kinds_of}", said_of))
        elif is_table(value):
            within = where if where in TABLES else "method"
            rows.append((f"`{f.name}`", "a table", link(type(value)), other_defaults(within, f.name, value)))
        else:
            rows.append((f"`{f.name}`", toml(value), takes(kinds[f.name]), meaning))
    return rows


TITLES = {
    "Local": "Local training",
    "Distill": "Distillation",
    "StopConfig": "Ending early",
}


def link(cls: type) -> str:
    """A link to the section about a kind of table within another one."""
    title = TITLES.get(cls.__name__, cls.__name__)
    return f"[{title.lower()}](#{title.lower().replace(' ', '-')})"


def other_defaults(within: str, name: str, value: Any) -> str:
    """Where a table within another one differs from the defaults of its kind."""
    plain = type(value)()
    differ = [
        f"`{f.name}` = {toml('none' if getattr(value, f.name) is None else getattr(value, f.name))}"
        for f in dataclasses.fields(value)
        if getattr(value, f.name) != getattr(plain, f.name)
    ]
    return f"`[{within}.{name}]`" + (", with " + ", ".join(differ) if differ else "")


def our_methods() -> dict[str, type[Method]]:
    """The methods of the library itself, by name."""
    return {n: cls for n, cls in sorted(METHODS.items()) if cls.__module__.startswith(OF_US)}


def slot_kinds(slot: type[Slot]) -> dict[str, type]:
    """The library's own kinds of a slot, the default first."""
    return {kind: cls for kind, cls in slot.kinds().items() if cls.__module__.startswith(OF_US)}


def first_kind(value: Slot) -> type[Slot]:
    """The class of a slot's first kind, from which its other kinds are derived."""
    return [cls for cls in type(value).__mro__ if issubclass(cls, Slot)][-2]  # the last one is Slot itself


def slots() -> dict[str, type[Slot]]:
    """The slots of methods, by the names of their first classes."""
    every = (default_of(f) for cls in our_methods().values() for f in dataclasses.fields(cls))
    return {cls.__name__: cls for cls in (first_kind(value) for value in every if isinstance(value, Slot))}


def shared_tables() -> dict[str, type]:
    """The kinds of tables within others, by the names of their classes."""
    found: dict[str, type] = {}

    def look(cls: type) -> None:
        for f in dataclasses.fields(cls):
            value = default_of(f)
            if is_table(value) and not isinstance(value, Slot) and type(value).__name__ not in found:
                found[type(value).__name__] = type(value)
                look(type(value))

    for cls in (*TABLES.values(), *our_methods().values()):
        look(cls)
    return dict(sorted(found.items()))


def places() -> list[tuple[str, type]]:
    """Everything that has settings, with the first part of its keys in MEANINGS."""
    kinds = [(cls.__name__, cls) for slot in slots().values() for cls in slot_kinds(slot).values()]
    return [*TABLES.items(), ("sites", SiteConfig), *our_methods().items(), *shared_tables().items(), *kinds]


def missing_meanings() -> list[str]:
    """Settings that neither a comment in the code nor MEANINGS explains."""
    return [f"{where}: {key}" for where, cls in places() for key, *_, text in settings(cls, where) if not text]


def unused_meanings() -> set[str]:
    """Entries of MEANINGS for settings that are no more."""
    known = {f"{at}.{f.name}" for where, cls in places() for f in dataclasses.fields(cls) for at in (where, "*")}
    return set(MEANINGS) - known


# ---- pages ------------------------------------------------------------------------------------------

HEAD = """\
# Configuration

<!-- Written by scripts/make_reference.py from the dataclasses in the code: change those, then run it. -->

A run is a TOML file, a recipe (`solera ls recipes`), or either with changes on the command line:

```console
$ solera run toy --rounds 3 --set partition.alpha=1 --set method.fusion.steps=100
$ solera run toy --set method.name=fedprox --set method.mu=0.1 --seed 7
```

- Every setting except `method.name` has a default. The run directory's `config.toml` holds all settings of the run.
- Unknown keys, wrong types and impossible values are refused before any work, all of a file in one line that names
  each key, its value and the nearest valid key (exit code 2). So are settings that the run would not read, such as
  `models.server` with a method that has no such model; where `--set` has decided so, they are left out with a note.
- `track.mlflow` in a file is refused unless `--set` says the same: it sends results [outside the run
  directory](export.md#tensorboard-and-mlflow).
- TOML has no null. Where "none" is among the values below, the string `"none"` turns the setting off; leaving the
  key out gives the default.
- `--set` takes a dotted key and a TOML value; a value that is not valid TOML is a string, so that
  `--set method.name=feddf` needs no quotes. A list is written `--set 'models.clients=["mlp", "resnet8"]'`.
- `--set method.name=...` on a recipe of another method keeps the federation (data, partition, models, ...) and
  `[method.local]`, the local training. The other settings of `[method]` get the new method's defaults: those of the
  first method would make the comparison unfair.
- Settings that the method needs and you have not set get a value, in a file and with `--set`: `data.client_test` for a
  method that is scored by clients' own models, `models.server` for one with a large model, `models.head`,
  `models.norm`, `public.source`, `public.labels`, and a smaller `method.K` if there are few clients. A line says what
  was set and why, and `config.toml` has it. Your own settings are never changed: if they do not fit, the run is refused
  with the reason.
- `--rounds`, `--seed`, `--engine`, `--workers` are short for `run.rounds`, `run.seed`, `engine.name`, `engine.workers`.
- `--dry-run` checks the whole run without training and [prints what it will send](scale.md#before-the-run).
- Relative paths of data (`data.path`, `public.path`, a site's `data`) are relative to where the command is run; those
  of code (`nets.py:make_small`) and of models (`hf:./my-encoder`) to the folder of the TOML, with `--set`, too, and for
  a recipe to where the command is run. All are stored as absolute ones.

From Python the same settings are `solera.RunConfig`, `PartitionConfig`, `PublicConfig`, `FederationConfig`,
`EngineConfig` and the method object; see [own data and models](data.md#your-own-data).

"""


def configuration() -> str:
    """docs/configuration.md."""
    head = ("key", "default", "takes", "meaning")
    parts = [HEAD]
    for name, cls in TABLES.items():
        parts += [f"## [{name}]\n\n", f"{inspect.getdoc(cls)}\n\n", table(head, settings(cls, name)), "\n"]
    parts += [
        "## [sites.NAME]\n\n",
        f"{inspect.getdoc(SiteConfig)} See [sites](sites.md).\n\n",
        table(head, settings(SiteConfig, "sites")),
        "\n",
    ]
    parts.append("## [method]\n\n`method.name` chooses the method; the other keys are its hyper-parameters.\n\n")
    for name, cls in our_methods().items():
        title = cls().about.title
        parts.append(f"### {name}\n\n[{title}](methods/{name}.md). {inspect.getdoc(cls)}\n\n")
        rows = settings(cls, name)
        if parent := next((n for n, known in our_methods().items() if known is cls.__base__), ""):
            same = settings(cls.__base__, parent)
            rows = [row for row in rows if row not in same]
            parts.append(f"The settings of [{parent}](#{parent})" + (", but:\n\n" if rows else ".\n\n"))
        parts.append(table(head, rows) + "\n" if rows else "" if parent else "No settings.\n\n")
    parts.append(
        "## Tables within [run] and [method]\n\n"
        "A method may have defaults of its own for these; they are named above.\n\n"
    )
    for name, cls in shared_tables().items():
        parts += [
            f"### {TITLES.get(name, name)}\n\n",
            f"{inspect.getdoc(cls)}\n\n",
            table(head, settings(cls, name)),
            "\n",
        ]
    parts.append(
        "## Slots of [method]\n\n"
        'Options that come in several kinds: `[method.upload]` with `kind = "low-bit"` and the settings of that kind, '
        "or `--set method.upload=low-bit` with its defaults. The first kind is the default and does nothing beyond the "
        "algorithm. Classes of your own, derived from the first, are further kinds ([own methods](own-method.md)).\n\n"
    )
    for name, slot in slots().items():
        parts.append(f"### {name}\n\n")
        for kind, cls in slot_kinds(slot).items():
            rows = settings(cls, cls.__name__)
            field = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
            parts.append(f'`[method.{field}]` with `kind = "{kind}"`. {inspect.getdoc(cls)}\n\n')
            parts.append(table(head, rows) + "\n" if rows else "")
    return "".join(parts).rstrip("\n") + "\n"


def methods_table() -> str:
    rows = []
    for name, cls in our_methods().items():
        i = described(cls())
        rows.append((f"[{name}](methods/{name}.md)", i.title, i.paper, i.models, i.public, i.state, i.privacy))
    head = ("name", "title", "paper", "client models", "public data", "a client keeps", "the method uses")
    return table(head, rows)


def recipes_table() -> str:
    rows = []
    for name in recipe_names():
        about = recipe_text(name).splitlines()[0].lstrip("# ").rstrip(".")
        rows.append((f"`{name}`", name_of(load_config(name).method), about))
    return table(("recipe", "method", "what it is"), rows)


def sources_table() -> str:
    rows = []
    for name, s in SOURCES.items():
        counts = " + ".join(f"{n:,}" for n in s.rows or ())
        shape = "text" if s.is_text else "x".join(map(str, s.shape[1:] + s.shape[:1]))
        rows.append(
            (
                f"`{name}`",
                s.title,
                str(s.classes) if s.classes else "as found",
                shape,
                counts,
                ", ".join(s.formats) or "made",
                f"`{s.hub}`" if s.hub else "-",
                s.licence,
            )
        )
    return table(("name", "title", "classes", "sample", "train + test", "read from", "hub id", "licence"), rows)


def models_table() -> str:
    def count(name: str, shape: tuple[int, ...]) -> Iterator[str]:
        try:
            with torch.device("meta"):
                size = size_of(build(name, 10, shape))
            yield f"{size.parameters:,}"
            yield f"{size.buffers:,}"
        except ConfigError:
            yield from ("too small", "-")

    rows = []
    for name, m in MODELS.items():
        if m.kind == "image" and not m.own:
            (gray, _), (colour, buffers) = count(name, (1, 28, 28)), count(name, (3, 32, 32))
            options = ", ".join(f"`{k}={v!r}`" for k, v in m.options.items()) or "-"
            norm = "yes" if m.has_norm else "never"
            rows.append((f"`{name}`", m.title, m.source, norm, gray, colour, buffers, options))
    head = ("name", "title", "from", "norm layers", "28x28x1", "32x32x3", "BatchNorm floats", "options (from Python)")
    return table(head, rows)


def text_models_table() -> str:
    rows = []
    for name, m in MODELS.items():
        if m.kind == "text" and not m.own:
            with torch.device("meta"):
                size = size_of(build(name, 2, (64,), vocabulary=20_000))
            options = ", ".join(f"`{k}={v!r}`" for k, v in m.options.items())
            rows.append((f"`{name}`", m.title, m.source, f"{size.parameters:,}", options))
    return table(("name", "title", "from", "parameters", "options (from Python)"), rows)


def example() -> str:
    """The method in examples/own_method.py, without its docstring and its main()."""
    text = (ROOT / "examples" / "own_method.py").read_text("utf-8")
    body = text[text.index('"""\n', 3) + 4 : text.index("\n\ndef main(")].strip("\n")
    return f"```python\n{body}\n```\n"


def architectures_of(traits: Traits) -> str:
    """What becomes of clients with different architectures."""
    if traits.architectures == "one":
        return "one only"
    words = {"nothing": "side by side", "predictions": "predict together", "knowledge": "teach each other"}
    return words[traits.across]


def public_of(traits: Traits) -> str:
    """Which public data is needed, and who must hold it."""
    if traits.public == "none":
        return "none"
    labels = "unlabelled" if traits.public_labels == "unused" else "labelled"
    return f"{labels}, {'everywhere' if traits.public == 'everywhere' else 'on the server'}"


def result_of(traits: Traits) -> str:
    """What is trained."""
    own = traits.server_model != "none"
    if not traits.personal:
        return "a large server model" if own else "global"
    return "personal, and a server model" if own else "personal"


SEES = {"means": "means", "individual": "single replies", "none": "nothing", "data": "all data"}


def choose_table() -> str:
    found: dict[tuple[str, ...], list[str]] = {}
    for name, cls in our_methods().items():
        traits = cls().traits()
        key = (architectures_of(traits), public_of(traits), result_of(traits), SEES[traits.replies])
        found.setdefault(key, []).append(f"[{name}](../methods/{name}.md)")
    order = ["teach each other", "predict together", "side by side", "one only"]
    rows = sorted(found.items(), key=lambda item: (order.index(item[0][0]), item[0]))
    head = ("different architectures", "public data", "models", "the method uses", "methods")
    return table(head, [(*key, ", ".join(names)) for key, names in rows])


def papers_table(paper: str) -> str:
    """The tables and figures of a paper, with the recipes that hold them."""
    rows = []
    for recipe in paper_names():
        p = load_paper(recipe)
        if p.paper == paper:
            cells = list(p.cells())
            skipped = sum(bool(c.skip) for c in cells)
            count = f"{len(cells)}, {skipped} of which cannot be run" if skipped else str(len(cells))
            needed = ", ".join(needs(p))
            rows.append((", ".join((p.item, *p.also)), f"`{recipe}`", p.title, count, needed))
    rows.sort(key=lambda row: [row[0].split()[0] != "Table", *map(int, re.findall(r"\d+", row[0])[:1]), row[1]])
    return table(("in the paper", "recipe", "what it shows", "cells", "needs at full scale"), rows)


BLOCKS = {
    **{f"paper {paper}": partial(papers_table, paper) for paper in PAPERS},
    "choose": choose_table,
    "methods": methods_table,
    "recipes": recipes_table,
    "sources": sources_table,
    "models": models_table,
    "text-models": text_models_table,
    "example": example,
}


def pages() -> dict[Path, str]:
    """Every page that is written or partly written here, as it should be."""
    wanted = {DOCS / "configuration.md": configuration()}
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text("utf-8")
        if page not in wanted and BLOCK.search(text):
            wanted[page] = BLOCK.sub(lambda m: m[1] + BLOCKS[m[2]]() + m[3], text)
    return wanted


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the generated parts of docs/.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if something is old")
    check = parser.parse_args().check
    old = 0
    for page, text in pages().items():
        if not page.is_file() or page.read_text("utf-8") != text:
            old += 1
            print(f"{'old' if check else 'written'}: {page.relative_to(ROOT)}")
            if not check:
                page.write_text(text, "utf-8")
    for key in missing_meanings():
        print(f"no meaning: {key} (write a comment beside the field)", file=sys.stderr)
    return 1 if check and old else 0


if __name__ == "__main__":
    sys.exit(main())
