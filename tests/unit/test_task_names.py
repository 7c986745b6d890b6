"""Task names are protocol: given, unique, and the same whatever file the function is in."""

import pathlib
import subprocess
import sys

import pytest

from solera.core.task import TASKS, Client, task

# What a message may ask for. A name that changes here breaks every deployment that runs another version: rename
# functions and move files as you like, and leave this list alone.
NAMES = {
    "choose_and_train",
    "contrastive_update",
    "controlled_move",
    "controlled_update",
    "digest_and_revisit",
    "distil_and_predict",
    "distil_and_train",
    "distil_and_train.mean",
    "distil_inferred",
    "distil_locally",
    "envelope_update",
    "extract_features",
    "fine_tune",
    "first_layer",
    "grouped_update",
    "learn_from_server",
    "local_update",
    "lowbit_update",
    "meta_update",
    "mix_and_train",
    "next_layer",
    "part_statistics",
    "personal_update",
    "prepare_and_score",
    "score_chosen",
    "score_chosen.mean",
    "score_own",
    "score_own.mean",
    "score_own_or_received",
    "score_own_or_received.mean",
    "score_received",
    "score_received.mean",
    "score_tuned",
    "score_tuned.mean",
    "score_with_tower",
    "score_with_tower.mean",
    "take_others",
    "train_alone",
    "train_and_answer",
    "train_and_count",
    "train_and_extract",
    "train_and_infer",
    "train_and_assess",
    "train_and_predict",
    "train_and_report",
    "train_and_score",
    "train_mixed",
    "train_part",
    "train_with_generator",
    "update_both",
}


def registered() -> set[str]:
    """The names after importing the package and making the mean form of every score, in a process of its own."""
    code = (
        "import solera.methods\n"
        "from solera.method import prepare_scoring\n"
        "from solera.core.task import TASKS\n"
        "prepare_scoring()\n"
        "print(*TASKS)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_names_of_the_protocol_stay():
    assert registered() == NAMES


def test_no_name_is_a_place_in_the_source():
    package = pathlib.Path(__file__).parents[2] / "src" / "solera"
    assert not {n for n in NAMES if "solera" in n or (package / (n.replace(".", "/") + ".py")).exists()}


def test_a_task_without_a_name_is_refused():
    with pytest.raises(TypeError, match=r'registered under a name: @task\("my_package.train"\)'):

        @task  # type: ignore[arg-type]
        def nameless(client: Client) -> None: ...


def test_a_name_that_is_taken_is_refused_and_stays_whose_it_was():
    @task("test_task_names.taken")
    def first(client: Client) -> None: ...

    with pytest.raises(
        TypeError, match=r"'test_task_names.taken' is already .*first .*: choose another name for .*second"
    ):

        @task("test_task_names.taken")
        def second(client: Client) -> None: ...

    assert TASKS["test_task_names.taken"] is first
