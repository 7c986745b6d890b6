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
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

import solera.methods  # noqa: F401  (registers them)
from solera.core.errors import ConfigError
from solera.core.settings import OFF, Slot, declared, hints, words
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
    "data.task": "what is learned; `causal-lm`: the next token of texts",
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
    "data.augment": "random changes of training images at each step, in this order, see "
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
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, value))}]"
    return "none" if value is None else f'"{value}"' if isinstance(value, str) else str(value)


def with_default(key: str, value: Any) -> str:
    """A setting as it is set to its default; the key alone where it is unset or empty."""
    return f"`{key}`" if value is None or value in ([], (), {}) else f"`{key}={toml(value)}`"


def takes(kind: Any, value: Any) -> str:
    """What a setting takes beside its default: other choices, or its range. A default shows its type by itself."""
    inner = declared(kind).inner
    if typing.get_origin(inner) is Literal and value is not None:
        text = ", ".join(f"`{a}`" for a in typing.get_args(inner) if a != value)
        text = f"or {text}" if text else ""
    elif inner is bool:
        text = ""
    else:
        text = words(kind).removesuffix(f' (or "{OFF}")').removeprefix("an ").removeprefix("a ")
        for long, short in SHORTER.items():
            text = text.replace(long, short)
        if value is not None and value != [] and value != () and value != {}:
            text = re.sub(r"^(integer|number|string|list of \w+)( |$)", "", text)
    return f'{text}, or "{OFF}"'.removeprefix(", ") if declared(kind).optional and value is not None else text


SHORTER = {"of at least ": "≥", "of at most ": "≤", "above ": ">", "below ": "<", " and ≤": ", ≤", " and <": ", <"}


def cell(text: str) -> str:
    """Text that does not end its cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join("| " + " | ".join(cell(c) for c in line) + " |\n" for line in lines)


def meaning_of(cls: type, where: str, name: str) -> str:
    """The meaning of a setting. `where` is the first part of its key in MEANINGS."""
    return MEANINGS.get(f"{where}.{name}") or inherited_comments(cls).get(name) or MEANINGS.get(f"*.{name}", "")


def lines(cls: type, where: str) -> dict[str, str]:
    """One line for each setting, by its key: default, what it takes, what it means."""
    found = {}
    for f in (f for f in dataclasses.fields(cls) if f.init):
        value = default_of(f)
        if isinstance(value, Slot):
            kinds_of = ", ".join(f"`{kind}`" for kind in slot_kinds(first_kind(value)))
            found[f.name] = f"`{f.name}`{other_defaults(value)}: {meaning_of(cls, where, f.name)}: {kinds_of}"
        elif is_table(value):
            found[f.name] = f"`{f.name}`{other_defaults(value)}: {link(type(value))}"
        else:
            other = takes(hints(cls)[f.name], value)
            meaning = meaning_of(cls, where, f.name)
            found[f.name] = f"{with_default(f.name, value)}{f' ({other})' if other else ''}: {meaning}"
    return found


def bullets(found: Iterable[str]) -> str:
    """The lines as a list."""
    return "".join(f"- {' '.join(line.split())}\n" for line in found)


TITLES = {
    "Local": "Local training",
    "Distill": "Distillation",
    "StopConfig": "Ending early",
}


def link(cls: type) -> str:
    """A link to the section about a kind of table within another one."""
    title = TITLES.get(cls.__name__, cls.__name__)
    shown = title.lower() if " " in title or title in TITLES.values() else title
    return f"[{shown}](#{title.lower().replace(' ', '-')})"


def other_defaults(value: Any) -> str:
    """Where a table within another one differs from the defaults of its kind, in brackets."""
    plain = type(value)()
    differ = [
        f"`{f.name}={toml(getattr(value, f.name))}`"
        for f in dataclasses.fields(value)
        if getattr(value, f.name) != getattr(plain, f.name)
    ]
    return f" ({', '.join(differ)})" if differ else ""


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
    return [
        f"{where}: {f.name}"
        for where, cls in places()
        for f in dataclasses.fields(cls)
        if f.init and not is_table(default_of(f)) and not meaning_of(cls, where, f.name)
    ]


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

- Every setting except `method.name` has a default; a run directory's `config.toml` has all of them.
- Below, `key=default` (range or other choices): meaning. A key without a default is unset. The string `"none"` unsets
  a key (TOML has no null) where it says so or the key is unset by default.
- A file's mistakes are refused at once, before any work, in one line that names each key, its value and what is
  expected (exit code 2). So are settings that the run would not read; where `--set` has decided that, they are left out
  with a note. `track.mlflow` must be said with `--set`: it sends results
  [elsewhere](export.md#tensorboard-and-mlflow).
- `--set` takes a dotted key and a TOML value, or a string without quotes: `--set 'models.clients=["mlp", "resnet8"]'`.
  `--rounds`, `--seed`, `--engine`, `--workers` are short for `run.rounds`, `run.seed`, `engine.name`, `engine.workers`.
- `--set method.name=...` keeps the federation and `[method.local]`; the rest of `[method]` gets the new method's
  defaults.
- What a method needs and you leave open (`data.client_test`, `models.server`, `models.head`, `models.norm`,
  `public.source`, `public.labels`, a smaller `method.K`) is set, with a line that says so. Your own settings never
  change: if they do not fit, the run is refused.
- `--dry-run` checks the whole run without training and [prints what it will send](scale.md#before-the-run).
- Relative paths of data are relative to the current folder; those of code (`nets.py:make_small`) and models
  (`hf:./my-encoder`) to the folder of the TOML, or to the current one for a recipe.

"""


SHARED = 3  # methods with the same setting, from which on it is explained once


def configuration() -> str:
    """docs/configuration.md."""
    parts = [HEAD]
    for name, cls in (*TABLES.items(), ("sites", SiteConfig)):
        title, more = ("sites.NAME", " See [sites](sites.md).") if name == "sites" else (name, "")
        parts.append(f"## [{title}]\n\n{inspect.getdoc(cls)}{more}\n\n{bullets(lines(cls, name).values())}\n")
    methods = {name: lines(cls, name) for name, cls in our_methods().items()}
    having: dict[tuple[str, str], list[str]] = {}  # key and meaning -> methods
    for name, found in methods.items():
        for key, line in found.items():
            having.setdefault((key, line.partition(": ")[2]), []).append(name)
    shared = {pair: names[0] for pair, names in sorted(having.items()) if len(names) >= SHARED}
    parts.append(
        "## [method]\n\n`method.name` chooses the method. These settings belong to several methods; each method below "
        "names those it has, with its own defaults:\n\n"
        + bullets(_without_default(our_methods()[name], key, said) for (key, said), name in shared.items())
        + "\n"
    )
    for name, found in methods.items():
        cls = our_methods()[name]
        known = [key for key, line in found.items() if (key, line.partition(": ")[2]) in shared]
        named = ", ".join(_named(cls, key) for key in known)
        own = bullets(line for key, line in found.items() if key not in known)
        parts.append(f"### {name}\n\n[{cls().about.title}](methods/{name}.md).{f' {named}.' if named else ''}\n\n")
        parts.append(f"{own}\n" if own else "")
    parts.append("## Tables within [run] and [method]\n\n")
    tables = shared_tables()
    for name, cls in tables.items():
        base = next((b for b in cls.__mro__[1:] if b in tables.values()), None)
        before = lines(base, base.__name__) if base else {}
        own = [line for key, line in lines(cls, name).items() if before.get(key) != line]
        more = f" As {link(base)}, but:" if base else ""
        parts.append(f"### {TITLES.get(name, name)}\n\n{inspect.getdoc(cls)}{more}\n\n{bullets(own)}\n")
    parts.append(
        "## Slots of [method]\n\n"
        'Options that come in several kinds: `[method.upload]` with `kind = "low-bit"` and the settings of that kind, '
        "or `--set method.upload=low-bit`. The first kind is the default; the others have its settings, too. Classes "
        "derived from the first are [further kinds](own-method.md).\n\n"
    )
    for name, slot in slots().items():
        parts.append(f"### {name}\n\n")
        before = {}
        for kind, cls in slot_kinds(slot).items():
            own = [line for key, line in lines(cls, cls.__name__).items() if before.get(key) != line]
            before = before or lines(cls, cls.__name__)
            parts.append(
                f"`{kind}`: {inspect.getdoc(cls)}\n\n{bullets(own)}\n"
                if own
                else f"`{kind}`: {inspect.getdoc(cls)}\n\n"
            )
    return "".join(parts).rstrip("\n") + "\n"


def _without_default(cls: type[Method], key: str, said: str) -> str:
    """The line of a setting whose default each method names itself."""
    value = default_of(cls.__dataclass_fields__[key])
    other = "" if is_table(value) else takes(hints(cls)[key], None)
    return f"`{key}`{f' ({other})' if other else ''}: {said}"


def _named(cls: type[Method], key: str) -> str:
    """A setting of several methods, with the default of this one."""
    value = default_of(cls.__dataclass_fields__[key])
    return f"`{key}`{other_defaults(value)}" if is_table(value) else with_default(key, value)


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
