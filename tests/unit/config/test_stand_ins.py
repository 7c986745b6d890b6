"""`run.stand_ins`: what a run has in place of what a paper used, as its configuration says."""

import tomllib

import pytest

from solera.core.errors import ConfigError
from solera.runs.config import load_config, recipe_names, to_toml, with_stand_ins, without_stand_ins

LAPTOP = {  # a laptop version -> the recipe of the paper
    "feddf/fig3-agnews-laptop": "feddf/fig3-agnews",
    "feddf/fig3-sst2-laptop": "feddf/fig3-sst2",
    "fedet/table2-sent140-laptop": "fedet/table2-sent140",
}


def tables(**stand_ins):
    return {
        "run": {"stand_ins": stand_ins},
        "data": {"name": "toy-text", "length": 16, "train_size": 100},
        "models": {"clients": ["text-bag"]},
        "method": {"name": "fedavg"},
    }


def test_keys_may_be_quoted_or_not_and_come_back_from_toml():
    plain = load_config(tables(data={"name": "sst2", "train_size": "none"}, models={"clients": ["lstm"]}))
    wanted = {"data.name": "sst2", "data.train_size": "none", "models.clients": ["lstm"]}
    assert plain.run.stand_ins == wanted
    assert load_config(tables(**wanted)).run.stand_ins == wanted
    assert load_config(tomllib.loads(to_toml(plain))) == plain


def test_without_a_paper_there_is_nothing_to_stand_in_for():
    assert load_config("toy").run.stand_ins is None
    assert "stand_ins" not in to_toml(load_config("toy"))


@pytest.mark.parametrize(
    ("stand_ins", "told"),
    [
        (
            {"data.nam": "sst2"},
            "run.stand_ins: data.nam = \"sst2\": there is no such setting; did you mean 'data.name'",
        ),
        ({"models.lora.rnk": 8}, "run.stand_ins: models.lora.rnk = 8: there is no such setting; did you mean"),
        ({"data.length": "long"}, 'run.stand_ins: data.length = "long": expected an integer of at least 1'),
        ({"models.clients": "lstm"}, 'run.stand_ins: models.clients = "lstm": expected a list of strings'),
        ({"data.name.x": "sst2"}, "run.stand_ins: data.name is a value, not a table"),
        ({"method.name": "feddf"}, 'run.stand_ins: "method.name" is no setting of [data], [partition], [public]'),
        ({"data": "sst2"}, 'run.stand_ins: "data" is no setting of'),
        ({"data.name": "none"}, None),  # a name like another; only settings that may be left out have a "none"
    ],
)
def test_wrong_spellings_and_values_are_refused(stand_ins, told):
    if told is None:
        assert load_config(tables(**stand_ins)).run.stand_ins == stand_ins
        return
    with pytest.raises(ConfigError) as error:
        load_config(tables(**stand_ins))
    assert str(error.value).startswith(told)
    assert "\n" not in str(error.value)


def test_the_table_itself_may_be_misspelt():
    given = tables()
    given["run"] = {"standins": {"data.name": "sst2"}}
    with pytest.raises(ConfigError, match=r"\[run.standins\]: there is no such table; did you mean 'run.stand_ins'"):
        load_config(given)


def test_an_override_with_the_papers_value_drops_its_own_entry_and_no_other():
    before = load_config("feddf/fig3-agnews-laptop").run.stand_ins
    after = load_config("feddf/fig3-agnews-laptop", ["data.name=ag-news"]).run.stand_ins
    assert before == {"data.name": "ag-news", **after}
    assert "models.clients" in after


def test_an_override_with_a_third_value_stays_a_stand_in():
    found = load_config("feddf/fig3-agnews-laptop", ["data.name=sst2", 'models.clients=["minilm-l2"]'])
    assert found.run.stand_ins["data.name"] == "ag-news"
    assert found.run.stand_ins["models.clients"] == ["hf:distilbert-base-uncased"]


def test_another_method_keeps_the_stand_ins():
    found = load_config("feddf/fig3-agnews-laptop", ["method.name=fedavg"])
    assert found.run.stand_ins == load_config("feddf/fig3-agnews-laptop").run.stand_ins


@pytest.mark.parametrize("name", LAPTOP)
def test_a_laptop_version_says_what_the_paper_has(name):
    papers, ours = load_config(LAPTOP[name]), load_config(name)
    named = ours.run.stand_ins
    assert named["data.name"] == papers.data.name != ours.data.name
    assert named["models.clients"] == papers.models.clients != ours.models.clients
    assert named.get("models.server") == papers.models.server
    assert papers.data.train_size is papers.data.test_size is None
    assert named["data.train_size"] == named["data.test_size"] == "none"


def test_every_laptop_version_of_a_papers_recipe_is_here():
    known = set(recipe_names())
    assert {n for n in known if n.endswith("-laptop")} == set(LAPTOP)
    assert set(LAPTOP.values()) <= known


# ---- overrides of a paper's own recipe ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        ([], {}),
        (["data.train_size=1000"], {"data.train_size": "none"}),
        (["public.size=100", "data.length=32"], {"public.size": 58_200, "data.length": 128}),
        (["models.weights=random"], {"models.weights": "pretrained"}),
        (["models.lora={rank = 8}"], {"models.lora.rank": "none"}),
        (["data.path=/my/copy"], {}),  # where it is does not change what it is
        (["data.name=ag-news"], {}),  # nothing changes
        (["run.rounds=2", "method.local.epochs=1", "federation.fraction=0.5"], {}),  # these are told elsewhere
    ],
)
def test_what_is_changed_in_a_papers_recipe_is_a_stand_in(overrides, found):
    assert load_config("feddf/fig3-agnews", overrides).run.stand_ins == found


def test_the_settings_of_another_cell_are_the_papers():
    row = ["method.name=fedavg", 'models.clients=["hf:prajjwal1/bert-mini"]']
    assert load_config("fedet/table2-sent140", row).run.stand_ins == {}
    other = load_config("fedet/table2-sent140", ['models.clients=["lstm"]'])
    assert other.run.stand_ins == {"models.clients": ["hf:prajjwal1/bert-tiny", "lstm"]}


def test_stand_ins_of_one_configuration_for_another():
    papers = without_stand_ins(load_config("feddf/fig3-sst2"))
    ours = load_config("feddf/fig3-sst2", ["data.train_size=10", "run.rounds=2", "data.path=/x", "partition.alpha=9"])
    assert with_stand_ins(without_stand_ins(ours), papers).run.stand_ins == {
        "data.train_size": "none",
        "partition.alpha": 1.0,
    }
    assert with_stand_ins(papers, papers).run.stand_ins == {}
