"""drop_worst: the best teacher is neither dropped nor a reason to drop or keep others."""

import pytest

from solera.train.teachers import drop_worst


@pytest.mark.parametrize(
    ("accuracies", "kept"),
    [
        # others .50 .50 .50 .46: mean .49, deviation .0173, so .464 is the least
        ([0.99, 0.50, 0.50, 0.50, 0.46], [0, 1, 2, 3]),
        ([0.50, 0.46, 0.50, 0.99, 0.50], [0, 2, 3, 4]),
        # others .40 .42 .44: mean .42, deviation .0163, least .3955
        ([0.90, 0.40, 0.42, 0.44], [0, 1, 2, 3]),
        ([0.3, 0.3, 0.3, 0.3], [0, 1, 2, 3]),
        ([0.6, 0.2], [0, 1]),  # one other: itself the mean
    ],
)
def test_outliers_are_judged_by_the_others_without_the_best(accuracies, kept):
    assert drop_worst(accuracies, 10, outlier=True) == kept


@pytest.mark.parametrize("outlier", [False, True])
@pytest.mark.parametrize("accuracies", [[0.05, 0.11, 0.08, 0.0], [0.0, 0.0], [0.119999], [0.3, 0.05, 0.01]])
def test_the_best_is_never_dropped(accuracies, outlier):
    kept = drop_worst(accuracies, 10, outlier=outlier)
    assert kept == [accuracies.index(max(accuracies))]


def test_a_threshold_of_certainty_keeps_only_what_is_always_right():
    assert drop_worst([1.0, 0.99], 10, threshold=10) == [0]
    assert drop_worst([0.98, 0.99], 10, threshold=10) == [1]
