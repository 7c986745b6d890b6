"""Tables of texts: named columns, JSON lines, users, and what is refused."""

import json

import numpy as np
import pytest

from solera.core.errors import ConfigError, DataError
from solera.data import PublicConfig, load
from solera.data.partition import PartitionConfig
from solera.scenario.scenario import Scenario

ROWS = [
    {"body": f"text {i}", "more": f"reply {i}", "mood": ("bad", "good")[i % 2], "who": f"u{i % 4}"} for i in range(40)
]


def write(folder, form, rows=ROWS, split="train"):
    folder.mkdir(exist_ok=True)
    if form == "jsonl":
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif form == "csv":
        lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
        (folder / f"{split}.csv").write_text("\n".join(lines) + "\n")
    else:
        pq = pytest.importorskip("pyarrow.parquet", reason="reading parquet needs pyarrow")
        import pyarrow as pa

        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")
    return folder


NAMED = {"text_column": "body", "label_column": "mood", "user_column": "who"}


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
def test_columns_by_name(tmp_path, form):
    folder = write(tmp_path / "mine", form)
    data = load("texts", folder, test_size=10, length=4, **NAMED)
    assert (len(data.train), len(data.test), data.class_names) == (30, 10, ("bad", "good"))
    assert set(data.user_names) == {"u0", "u1", "u2", "u3"}
    rows = {row["body"]: row for row in ROWS}
    for text, label, user in zip(data.texts.train, data.train.labels.tolist(), data.users.tolist(), strict=True):
        assert data.class_names[label] == rows[text]["mood"]
        assert data.user_names[user] == rows[text]["who"]
    pairs = load("texts", folder, test_size=10, pair_column="more", **NAMED)
    assert set(pairs.texts.train) <= {(row["body"], row["more"]) for row in ROWS}
    one = next(folder.iterdir())
    assert load("texts", one, test_size=10, length=4, **NAMED).texts == data.texts  # a file is as good as its folder


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
def test_a_column_that_is_not_there(tmp_path, form):
    folder = write(tmp_path / "mine", form)
    with pytest.raises(DataError, match=r"has no column 'boby'; it has body, more, mood, who"):
        load("texts", folder, text_column="boby", label_column="mood")
    with pytest.raises(DataError, match=r"but has body, more, mood, who; .* data.text_column, data.label_column"):
        load("texts", folder)


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
def test_empty_texts_are_refused(tmp_path, form):
    rows = [{**row, "body": " " if i in (3, 7) else row["body"]} for i, row in enumerate(ROWS)]
    folder = write(tmp_path / "mine", form, rows)
    write(folder, form, ROWS[:4], "test")
    with pytest.raises(DataError, match=r"texts, train: 2 of 40 rows have no text \(counted from 0: 3, 7\)"):
        load("texts", folder, **NAMED)


def test_labels_that_are_out_of_range_or_unknown(tmp_path):
    folder = tmp_path / "ag"
    folder.mkdir()
    (folder / "train.csv").write_text('text,label\n"a b",0\n"c d",4\n')
    (folder / "test.csv").write_text('text,label\n"a b",0\n')
    with pytest.raises(DataError, match=r"ag-news, train: labels run from 0 to 4, but with 4 classes .* 0\.\.3"):
        load("ag-news", folder)
    write(tmp_path / "mine", "jsonl")
    write(tmp_path / "mine", "jsonl", [{**ROWS[0], "mood": "sad"}], "test")
    with pytest.raises(DataError, match=r"texts, test: labels \['sad'\] do not occur in the training split"):
        load("texts", tmp_path / "mine", **NAMED)


def numbered(folder, form, labels, split="train"):
    return write(folder, form, [{"text": f"text {i}", "label": label} for i, label in enumerate(labels)], split)


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize(
    ("labels", "told"),
    [
        ([0, 1, 900000, 1], "labels 0, 1, 900000: 3 different ones, but classes count from 0 to 2; renumber them, or"),
        ([1, 2, 1, 2], "labels 1, 2: 2 different ones, but classes count from 0 to 1"),
        ([9, *range(8)], r"labels 0, 1, 2, 3, 4, \.\.\., 9: 9 different ones, but classes count from 0 to 8"),
    ],
)
def test_numbers_that_leave_gaps_are_no_classes(tmp_path, form, labels, told):
    with pytest.raises(DataError, match=f"^texts: {told}"):
        load("texts", numbered(tmp_path, form, labels), test_size=1)


def test_a_class_may_be_missing_in_a_split_or_a_sample(tmp_path):
    numbered(tmp_path, "jsonl", [0, 2, 0, 2])
    numbered(tmp_path, "jsonl", [1, 1], "test")
    assert load("texts", tmp_path).classes == 3
    assert load("texts", tmp_path, train_size=1, test_size=1).classes == 3


def test_topics_of_language_models_may_leave_gaps(tmp_path):
    data = load("texts", numbered(tmp_path, "jsonl", [1, 5, 1, 5]), test_size=1, length=8, task="causal-lm")
    assert data.train.labels.unique().tolist() == [1, 5]


@pytest.mark.parametrize("labels", [[[1, 2], [1, 2]], [[1], [1, 2]], [0, {"a": 1}]])
def test_a_row_has_one_label(tmp_path, labels):
    kind = type(labels[1]).__name__ if labels[0] == 0 else "list"
    told = rf"train.jsonl: the label of row [01] \(counted from 0\) is a {kind}; expected one class"
    with pytest.raises(DataError, match=told):
        load("texts", numbered(tmp_path, "jsonl", labels), test_size=1)


def test_texts_stay_as_they_are_written(tmp_path):
    """A reader that guesses types makes a date, a number or nothing of these."""
    texts = ["2020-01-01", "007", "NA", "null", "1e5"]
    rows = [{"text": text, "label": i % 2} for i, text in enumerate(texts * 2)]
    for form in ("csv", "jsonl"):
        data = load("texts", write(tmp_path / form, form, rows), test_size=2)
        assert set(data.texts.train) | set(data.texts.test) <= set(texts)


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
def test_several_files_are_one_split(tmp_path, form):
    folder = write(tmp_path / "mine", form, ROWS[:25], "train-0")
    write(folder, form, ROWS[25:], "train-1")
    data = load("texts", folder, test_size=10, length=4, **NAMED)
    assert sorted([*data.texts.train, *data.texts.test]) == sorted(row["body"] for row in ROWS)
    write(folder, form, [{"body": "x", "mood": "bad", "more": "y"}], "train-1")
    with pytest.raises(DataError, match=rf"train-1.{form}: has no column 'who'"):
        load("texts", folder, **NAMED)


def test_a_row_that_is_too_long_is_refused_and_not_cut(tmp_path):
    (tmp_path / "train.csv").write_text("text,label\na,0\nb, c,1\n")
    with pytest.raises(DataError, match=r"train.csv: line 3 has 3 columns, expected 2; is a quote missing\?"):
        load("texts", tmp_path)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "is empty"),
        ('{"text": "a", "label": 0}\nnonsense\n', "line 2 is not JSON"),
        ('{"text": "a", "label": 0}\n[1]\n', "line 2 is a list; expected an object"),
        ('{"text": "a", "label": 0}\n{"text": "b"}\n', r"row 1 \(counted from 0\) of column 'label' is empty; fill it"),
        ('{"text": 3, "label": 0}\n{"text": "b", "label": 1}\n', "expected text"),
    ],
)
def test_damaged_json_lines(tmp_path, content, told):
    (tmp_path / "train.jsonl").write_text(content)
    with pytest.raises(DataError, match=told):
        load("texts", tmp_path, test_size=1)


def test_texts_without_labels_will_do_for_language_models(tmp_path):
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": f"line {i}"}) + "\n" for i in range(20)))
    with pytest.raises(DataError, match=r"needs the columns image or text and label, but has text"):
        load("texts", tmp_path)
    data = load("texts", tmp_path, test_size=5, length=8, task="causal-lm")
    assert (len(data.train), data.train.labels.unique().tolist()) == (15, [0])


def test_a_sample_depends_on_the_seed(tmp_path):
    folder = write(tmp_path / "mine", "jsonl")
    some = [load("texts", folder, 10, 10, seed, **NAMED).texts for seed in (0, 0, 1)]
    assert some[0] == some[1]
    assert some[0].train != some[2].train


# ---- users ------------------------------------------------------------------------------------------


def by_user(tmp_path, **options):
    rows = [{"text": f"t {u} {i}", "label": i % 2, "user": f"u{u}"} for u in range(10) for i in range(2 + 2 * u)]
    folder = write(tmp_path / "mine", "jsonl", rows)
    return load("texts", folder, **({"test_size": 10} | options))


def users_in(texts):
    return {text.split()[1] for text in texts}


def test_users_with_few_samples_are_left_out_and_others_are_for_testing(tmp_path):
    data = by_user(tmp_path, user_min=6, test_users=0.25, test_size=None)
    train, test = users_in(data.texts.train), users_in(data.texts.test)
    assert (len(train), len(test), train & test) == (6, 2, set())
    assert train | test == {str(u) for u in range(2, 10)}  # user u has 2 + 2u samples
    assert by_user(tmp_path, user_min=6, test_users=0.25, test_size=None).texts == data.texts


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"user_min": 99}, "data.user_min = 99: 0 of 10 users"),
        ({"test_users": 0.01}, "data.test_users = 0.01 of them are 0"),
        (
            {"user_min": 3, "label_column": "label", "text_column": "text", "user_column": "nobody"},
            "no column 'nobody'",
        ),
    ],
)
def test_users_that_are_not_there(tmp_path, options, told):
    with pytest.raises((ConfigError, DataError), match=told):
        by_user(tmp_path, **options)


def test_sets_without_users_and_loaders_of_ones_own_are_refused(tmp_path):
    (tmp_path / "train.csv").write_text("text,label\n" + "".join(f"t {i},{i % 2}\n" for i in range(20)))
    with pytest.raises(ConfigError, match=r"data.user_min = 2: texts has no users; .* data.user_column"):
        load("texts", tmp_path, user_min=2)
    with pytest.raises(ConfigError, match=r"data.text_column: 'toy-2d' is not read from a table"):
        load("toy-2d", text_column="x")


def test_public_users_are_nobodys_clients(tmp_path):
    data = by_user(tmp_path, user_min=4)
    public = PublicConfig(users=0.25)
    scenario = Scenario(data, ["text-bag"], PartitionConfig(kind="user"), public, seed=3)
    theirs = {data.user_names[u] for u in data.users.tolist()} - set(scenario.roster)
    assert (len(scenario.roster), len(theirs)) == (7, 2)
    rows = np.isin([data.user_names[u] for u in data.users.tolist()], list(theirs))
    assert len(scenario.public) == rows.sum()
    assert sorted(map(tuple, scenario.public.raw.tolist())) == sorted(map(tuple, data.train.inputs[rows].tolist()))
    other = Scenario(data, ["text-bag"], PartitionConfig(kind="user"), public, seed=4)
    assert set(other.roster) != set(scenario.roster)


def test_public_users_need_users_and_no_size(tmp_path):
    with pytest.raises(ConfigError, match=r"public.users = 0.2: fashion-mnist has no users"):
        Scenario(load("fashion-mnist", train_size=40, test_size=10), ["mlp"], PartitionConfig(clients=2),
                 PublicConfig(users=0.2))  # fmt: skip
    with pytest.raises(ConfigError, match=r"users = 0.2"):
        PublicConfig(users=0.2, size=5)
    with pytest.raises(ConfigError, match=r"public.users = 0.01: of 9 users these are 0"):
        Scenario(by_user(tmp_path, user_min=4), ["text-bag"], PartitionConfig(kind="user"), PublicConfig(users=0.01))
