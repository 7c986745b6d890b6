"""Sites with texts: each reads them with its own model's tokenizer, knows no other, and gives the client that the
simulation of all has."""

import copy
import functools
import json

import pytest
import torch
from torch import nn

import solera
from run_directories import lines_of
from solera import Scenario, simulate
from solera.core.errors import ConfigError, DataError
from solera.core.plugins import code_allowed
from solera.data import PublicConfig, public_from_dataset, tokenize
from solera.data.dataset import Spec
from solera.data.encodings import BYTES, VOCABULARY, WORDS
from solera.data.site_data import SiteConfig, hold, read_site
from solera.engines import serve
from solera.methods import FedAvg
from solera.place.placement import Placement
from solera.runs import loop
from solera.runs.config import RunConfig, load_config
from solera.runs.loop import scenario_of
from solera.runs.sites import server_of_sites, site_host
from solera.scenario.task_data import DataConfig, stated_spec
from solera.train.fitting import Local, logits_of
from solera.use.predict import predict
from solera.use.trained import open_run
from text_sites import GOOD, sentences, text_sites, write_tables, write_texts

pytest.importorskip("transformers", reason="needs the extra text")
LOCAL = {"epochs": 1, "batch": 4, "lr": 0.05}
FUSION = {"steps": 3, "batch": 8}
LARGE = {"name": "fusionlarge", "local": LOCAL, "fusion": FUSION}
METHODS = {
    "fusionlarge": LARGE,  # a large model of the server learns from the clients' models
    "mnfl": {"name": "mnfl", "local": LOCAL},  # the others: clients predict public samples, and learn from predictions
    "fedmd": {"name": "fedmd", "private": LOCAL, "revisit": LOCAL},
    "feddf": {"name": "feddf", "local": LOCAL, "fusion": FUSION},
    "dsfl": {"name": "dsfl", "local": LOCAL},
    "fedgems": {"name": "fedgems", "local": LOCAL},
    "decentralised": {"name": "decentralised", "local": LOCAL, "distill": {"epochs": 1}},
}
FAST = ("fusionlarge", "mnfl", "fedmd")
WITHOUT_A_MODEL_OF_THE_SERVER = ("mnfl", "fedmd", "feddf", "decentralised")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("texts")


@pytest.fixture(scope="module")
def written(home):
    return text_sites(home, LARGE)


@pytest.fixture
def tables(written):
    return copy.deepcopy(written)


def config_of(home, tables, *overrides):
    """A configuration as it is read from a file in `home`: its code and its encoder are beside it."""
    with code_allowed(home):
        return load_config(write_tables(home / "federation.toml", tables), overrides)


def executed(home, out, tables, *overrides):
    with code_allowed(home):
        return loop.run(config_of(home, tables, *overrides), out).summary


@pytest.fixture(scope="module")
def expected(home, written, tmp_path_factory):
    """The run in one process, and its digest."""
    out = tmp_path_factory.mktemp("serial") / "run"
    return out, executed(home, out, written)["digest"]


class Elsewhere:
    """An engine whose sites are each made by themselves, as a deployment has them: no data is shared."""

    def __init__(self, hosts, roster, states):
        self.hosts, self.roster, self.states = hosts, roster, states

    def start(self, calls):
        return lambda: (serve(c, self.hosts[c.client], self.states, Placement()) for c in calls)

    def close(self):
        pass


def hosts_of(home, tables):
    """The host of every site, from a file that names no other site and none of the server's data."""
    found = {}
    for k, site in tables["sites"].items():
        own = {**tables, "data": {**tables["data"], "path": "/nowhere"}, "sites": {k: site}}
        models = {name: value for name, value in tables.get("models", {}).items() if name not in ("server", "options")}
        if (options := tables.get("models", {}).get("options", {}).get(site["model"])) is not None:
            models["options"] = {site["model"]: options}
        own["models"] = models  # as `deploy init` writes it: nothing of the models of others
        with code_allowed(home):
            found[k] = site_host(config_of(home, own), k)
    return found


def server_file(tables):
    """It says nothing of the sites' data."""
    return {**tables, "sites": {k: {"model": site["model"]} for k, site in tables["sites"].items()}}


@pytest.mark.parametrize("method", [pytest.param(m, marks=() if m in FAST else pytest.mark.slow) for m in METHODS])
def test_sites_that_know_only_their_own_tokenizer_end_as_the_simulation_of_all(home, tables, tmp_path, method):
    tables["method"] = METHODS[method]
    if method in WITHOUT_A_MODEL_OF_THE_SERVER:
        del tables["models"]["server"], tables["models"]["options"]["transformer"]
    simulated = executed(home, tmp_path / "simulated", tables)
    hosts = hosts_of(home, tables)
    config = config_of(home, server_file(tables))
    with code_allowed(home):
        scenario = server_of_sites(config, {k: host.hello() for k, host in hosts.items()})
    reach = functools.partial(Elsewhere, hosts, scenario.roster)
    result = simulate(scenario, config.method, tmp_path / "deployed", config.run, config.federation, reach=reach)
    assert result.digest == simulated["digest"]
    assert [line["failures"] for line in lines_of(tmp_path / "deployed")] == [[], []]


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_every_engine_gives_the_same_bits(home, tables, expected, tmp_path, engine):
    again = executed(home, tmp_path / "run", tables, f"engine.name={engine}", "engine.workers=2")
    assert again["digest"] == expected[1]


def test_a_resumed_run_gives_the_same_bits(home, tables, expected, tmp_path):
    with code_allowed(home):
        loop.run(config_of(home, tables, "run.rounds=1"), tmp_path / "run")
        again = loop.run(config_of(home, tables), tmp_path / "run", resume=True).summary
    assert again["digest"] == expected[1]


def test_what_a_run_says_of_tokenizers_and_what_its_models_predict(home, expected, tmp_path):
    out, _ = expected
    told = json.loads((out / "run.json").read_text())["experiment"]["data"]["encodings"]
    assert [row["tokenizer"].partition("-")[0] for row in told] == ["wordpiece", "words", "bytes"]
    file = tmp_path / "new.txt"
    file.write_text("good film\nbad day\n")
    with code_allowed(home):
        trained = open_run(out, trust_code=True)
        said = predict(trained, file, "transformer")
    assert said.class_names == ("good", "bad")
    assert said.probabilities.shape == (2, 2)


def test_a_site_holds_the_tokens_of_its_own_model_alone_whoever_else_is_there(home, tables):
    alone = hosts_of(home, tables)
    with code_allowed(home):
        among = scenario_of(config_of(home, tables))
        tables["sites"].pop("west")
        fewer = scenario_of(config_of(home, tables))
    assert among.dataset.shape == (3 * 24,)
    assert fewer.dataset.shape == (2 * 24,)
    for k, host in alone.items():
        itself = host.client(k, 1, {}, Placement())
        for scenario in (among, fewer):
            if k not in scenario.roster:
                continue
            client = scenario.client(k, 1, {})
            rows = torch.arange(len(itself.public))
            assert client.train.inputs.shape[1] == 24
            assert torch.equal(client.train.inputs, itself.train.inputs)
            assert torch.equal(client.test.inputs, itself.test.inputs)
            assert torch.equal(client.public[rows], itself.public[rows])
            assert torch.equal(*(logits_of(c.model(), c.train.inputs) for c in (client, itself)))
            assert scenario.hosts[k].hello() == host.hello()
    texts = [text for text, _ in sentences(16, 4)]
    north = alone["north"]
    assert sorted(north.texts) == sorted(t for t in texts if t in north.texts)
    assert torch.equal(north.train.of.inputs, tokenize(north.texts, 24)), "the site of the LSTM reads words"
    assert torch.equal(alone["west"].train.of.inputs, BYTES.encode(alone["west"].texts, 24)[0])


def test_classes_have_the_order_that_is_stated_not_that_of_their_names(home, tables):
    with code_allowed(home):
        scenario = scenario_of(config_of(home, tables))
    kinds = [text.split()[0] in GOOD for text in scenario.dataset.texts.test]
    assert scenario.test.labels.tolist() == [0 if good else 1 for good in kinds]
    assert scenario.dataset.class_names == ("good", "bad")


def test_all_samples_in_one_place_are_read_by_every_model(home, tables, tmp_path):
    """The upper bound of a rehearsal, which needs the texts of all sites."""
    tables["method"] = {"name": "centralised", "local": LOCAL}
    with code_allowed(home):
        scenario = scenario_of(config_of(home, tables))
        whole = scenario.server.all_train
        texts = [text for k in ("east", "north", "west") for text in scenario.hosts[k].texts]
        assert torch.equal(whole.inputs, scenario.dataset.tokens(texts))
        assert loop.run(config_of(home, tables), tmp_path / "run").digest


def test_a_server_alone_may_have_another_tokenizer(home, tables):
    for site in tables["sites"].values():
        site["model"] = "lstm"
    tables["models"]["server"] = "hf:./encoder"
    del tables["models"]["options"]["transformer"]
    with code_allowed(home):
        scenario = scenario_of(config_of(home, tables))
    assert [c.encoding.name.partition("-")[0] for c in scenario.dataset.columns] == ["words", "wordpiece"]
    assert scenario.client("east", 1, {}).train.inputs.shape[1] == 24
    assert scenario.specs["lstm"].tokenizer == ""


def test_what_is_sent_of_public_texts_is_the_texts(home, tables):
    tables["public"]["where"] = "server"
    with code_allowed(home):
        scenario = scenario_of(config_of(home, tables))
    letters = sum(len(text) for text, _ in sentences(24, 2) if text in scenario.public.texts)
    assert len(scenario.public) < 24  # a test split was taken out
    sent = scenario.server.lent
    assert sum(t.nbytes for t in sent.tensors) == letters + 8 * len(scenario.public), "letters, and a length for each"
    assert sent.size == len(sent.blob)


def test_the_settings_of_encoders_hold_for_sites(home, tables):
    tables["models"]["weights"] = "random"
    hosts = hosts_of(home, tables)
    config = config_of(home, server_file(tables))
    with code_allowed(home):
        scenario = server_of_sites(config, {k: host.hello() for k, host in hosts.items()})
    pretrained = "body.model.embeddings.word_embeddings.weight"
    here, there = (m.state_dict()[pretrained] for m in (scenario.server.template("encoder"), hosts["east"].template()))
    assert torch.equal(here, there)
    del tables["models"]["weights"]
    assert not torch.equal(here, hosts_of(home, tables)["east"].template().state_dict()[pretrained])


# ---- from Python ------------------------------------------------------------------------------------


class Spelled(nn.Module):
    """Counts bytes."""

    encoding = BYTES

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(256, 2)

    def forward(self, ids):
        return self.out(nn.functional.one_hot(ids, 256).sum(1).float())


TEXTS, LABELS = ["good film", "bad", "fine day", "poor"] * 4, [0, 1, 0, 1] * 4


def server_texts():
    return solera.data.from_texts((TEXTS, LABELS), (TEXTS, LABELS), length=8)


def test_python_gives_texts_and_models(tmp_path):
    own = solera.data.from_texts((TEXTS[:9], LABELS[:9]), (TEXTS[:3], LABELS[:3]), length=8)
    bytes_ = Spelled()
    scenario = Scenario(
        server_texts(),
        public=public_from_dataset(server_texts().encoded([BYTES, WORDS]).spec, server_texts(), PublicConfig()),
        sites={"a": ((TEXTS, LABELS), bytes_), "b": (own, bytes_), "c": ((TEXTS, LABELS), "text-bag")},
        client_test={"a": (["good"], [0]), "b": (["bad"], [1]), "c": (["poor"], [1])},
    )
    assert {k: scenario.client(k, 0, {}).test.inputs[0].tolist() for k in scenario.roster} == {
        "a": BYTES.encode(["good"], 8)[0][0].tolist(),
        "b": BYTES.encode(["bad"], 8)[0][0].tolist(),
        "c": tokenize(["poor"], 8)[0].tolist(),
    }
    assert torch.equal(scenario.client("b", 0, {}).train.inputs, BYTES.encode(TEXTS[:9], 8)[0])
    assert torch.equal(scenario.client("c", 0, {}).public[torch.tensor([1])], tokenize(["bad"], 8))
    alone = Scenario(server_texts(), sites={"a": ((TEXTS, LABELS), bytes_)})
    result = simulate(alone, FedAvg(Local(epochs=1, batch=4)), tmp_path / "run", RunConfig(rounds=1))
    assert result.models["spelled"].architecture == "spelled"


def test_public_texts_are_read_as_far_as_the_task_s_whatever_length_they_came_with():
    short = solera.data.from_texts((TEXTS, LABELS), (TEXTS, LABELS), length=1)
    for encodings, wanted in (([WORDS], tokenize(["good film"], 8)), ([BYTES], BYTES.encode(["good film"], 8)[0])):
        form = server_texts().encoded(encodings).spec
        assert torch.equal(public_from_dataset(form, short, PublicConfig()).raw[:1], wanted)


# ---- refusals ---------------------------------------------------------------------------------------

FORM = Spec("texts", (8,), 2, vocabulary=VOCABULARY, class_names=("good", "bad"))


def test_a_site_with_another_tokenizer_is_named_before_any_work(home, tables, tmp_path):
    """The same architecture, layers and sizes; only what two of the ids mean is different there."""
    hellos = {k: host.hello() for k, host in hosts_of(home, tables).items()}
    there = text_sites(tmp_path, LARGE)
    file = tmp_path / "encoder" / "tokenizer.json"
    known = json.loads(file.read_text())
    ids = known["model"]["vocab"]
    ids["good"], ids["bad"] = ids["bad"], ids["good"]
    file.write_text(json.dumps(known))
    hellos["east"] = hosts_of(tmp_path, {**there, "sites": {"east": there["sites"]["east"]}})["east"].hello()
    config = config_of(home, server_file(tables))
    said = r"site east: tokenizer is wordpiece-\w+ there and wordpiece-\w+ here: the tokenizer of sites\.east\.model"
    with code_allowed(home), pytest.raises(ConfigError, match=said):
        server_of_sites(config, hellos)


def test_a_site_that_reads_more_tokens_or_other_public_texts_is_named(home, tables):
    longer, others = copy.deepcopy(tables), copy.deepcopy(tables)
    longer["data"]["length"] = 25
    others["public"]["path"] = write_texts(home / "other.csv", 24, 9)
    hellos = {k: host.hello() for k, host in hosts_of(home, tables).items()}
    config = config_of(home, server_file(tables))
    for wrong, field in ((longer, "form"), (others, "public")):
        for k, host in hosts_of(home, wrong).items():
            with code_allowed(home), pytest.raises(ConfigError, match=f"site {k}: {field} is"):
                server_of_sites(config, {**hellos, k: host.hello()})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"task": "causal-lm"}, r"data.task = 'causal-lm' with \[sites\]: sites learn to classify"),
        ({"shape": [32]}, r"data.shape = \[32\]: of texts, a sample is the first 24 tokens"),
        ({"classes": ["good", "dull"]}, "the class 'bad' is not one of data.classes"),
        ({"name": "table", "shape": [3]}, "a model brings the tokenizer 'wordpiece-.* needs texts"),
    ],
)
def test_what_text_sites_cannot_be_is_said_in_one_line(home, tables, change, said):
    tables["data"] |= change
    with code_allowed(home), pytest.raises((ConfigError, DataError), match=said):
        scenario_of(config_of(home, tables))


def test_a_server_s_table_lacks_no_class_of_the_sites_but_has_no_other(home, tables, tmp_path):
    """By name, in the order that is stated: a table alone knows only the classes that are in it."""
    tables["data"]["classes"] = ["so-so", "good", "bad"]
    with code_allowed(home):
        scenario = scenario_of(config_of(home, tables))
        assert scenario.dataset.classes == 3
        assert scenario.test.labels.unique().tolist() == [1, 2]
        tables["sites"].pop("east")
        tables["data"]["classes"] = ["bad"]
        with pytest.raises(DataError, match=r"the class 'good' is not one of data\.classes"):
            scenario_of(config_of(home, tables))


def test_texts_out_of_the_server_s_own_python_are_refused_with_the_way_out(tmp_path):
    code = (
        "from solera.data import from_texts\n\n"
        "def reviews(path=None):\n    return from_texts((['a'], [0]), (['b'], [1]))\n"
    )
    (tmp_path / "reviews.py").write_text(code)
    tables = {
        "data": {"name": "reviews.py:reviews", "shape": [8], "classes": ["a", "b"]},
        "sites": {"a": {"data": table_of_numbers(tmp_path), "model": "mlp"}},
        "method": {"name": "fedavg"},
    }
    with (
        code_allowed(tmp_path),
        pytest.raises(ConfigError, match="has texts, but sites cannot know that"),
    ):
        scenario_of(config_of(tmp_path, tables))


def table_of_numbers(folder):
    file = folder / "a.csv"
    file.write_text(",".join("abcdefgh") + ",label\n" + ("1," * 8 + "0\n") * 4)
    return str(file)


def test_token_ids_are_not_enough_for_a_model_with_a_tokenizer():
    form = FORM.read_by(BYTES)
    ids = (tokenize(["a b"], 8), [0])
    for given in (ids, solera.from_tensors(ids, ids)):
        with pytest.raises(DataError, match=r"site a: samples are token ids, .* own tokenizer, bytes: give texts"):
            hold("a", given, form, 0.0, 0)
    assert hold("a", ids, FORM, 0.0, 0).texts is None
    with pytest.raises(DataError, match="site a: samples are texts; own has images or vectors"):
        hold("a", (["a b"], [0]), Spec("own", (8,), 2), 0.0, 0)
    with pytest.raises(ConfigError, match=r"own: a model brings the tokenizer 'bytes' and needs texts"):
        Spec("own", (8,), 2).read_by(BYTES)


def test_a_table_has_texts_or_pairs_of_them(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("first,second,label\nis it,it is,good\nno,yes,bad\n")
    form = FORM.read_by(BYTES)
    one = read_site("a", SiteConfig(data=str(file), columns=["second"]), form, 0.0, 0)
    assert one.texts == ("it is", "yes")
    pairs = read_site("a", SiteConfig(data=str(file), columns=["first", "second"]), form, 0.0, 0)
    assert pairs.texts == (("is it", "it is"), ("no", "yes"))
    assert pairs.train.labels.tolist() == [0, 1]
    assert torch.equal(pairs.train.inputs, BYTES.encode(pairs.texts, 8)[0])
    held = read_site("a", SiteConfig(data=str(file), columns=["first"], test=0.5), form, 0.0, 0)
    assert torch.equal(held.train.inputs, BYTES.encode(held.texts, 8)[0]), "the texts are those of the samples"
    with pytest.raises(ConfigError, match="name one text column, or two for pairs"):
        read_site("a", SiteConfig(data=str(file), columns=["first", "second", "label"]), form, 0.0, 0)
    file.write_text("text,label\n ,good\nyes,bad\n")
    with pytest.raises(DataError, match=r"1 of 2 rows have no text \(counted from 0: 0\)"):
        read_site("a", SiteConfig(data=str(file)), form, 0.0, 0)


def test_the_form_of_words_is_that_of_before():
    assert FORM.read_by(WORDS) is FORM
    assert FORM.read_by(BYTES).read_by(WORDS) == FORM
    assert stated_spec(DataConfig(name="sst2", length=32)).shape == (32,)


def test_the_classes_of_a_named_set_have_its_names_at_the_server_and_at_the_sites(home, tmp_path):
    (tmp_path / "sst2").mkdir()
    for split in ("train", "validation"):
        (tmp_path / "sst2" / f"{split}.csv").write_text("sentence,label\nfine,1\ndull,0\n")
    (tmp_path / "a.csv").write_text("text,label\ngood,positive\nbad,negative\n")
    tables = {
        "data": {"name": "sst2", "path": str(tmp_path / "sst2"), "length": 8},
        "sites": {"a": {"data": str(tmp_path / "a.csv"), "model": "text-bag"}},
        "method": {"name": "fedavg"},
    }
    hosts = hosts_of(tmp_path, tables)
    assert hosts["a"].train.labels.tolist() == [1, 0]
    scenario = server_of_sites(config_of(tmp_path, server_file(tables)), {"a": hosts["a"].hello()})
    assert scenario.dataset.class_names == ("negative", "positive")
