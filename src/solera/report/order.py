"""An order in which similar items are neighbours: average linkage, with each merge oriented by its ends."""

from collections.abc import Sequence


def similar_order(similarity: Sequence[Sequence[float]]) -> list[int]:
    """Positions of a symmetric similarity matrix, with similar ones side by side. For a few hundred items at most.

    The order of a dendrogram's leaves. There are four ways to join two groups; it takes the one whose adjacent ends are
    most similar. Ties go to the first, so the order is always the same.
    """
    n = len(similarity)
    groups = {i: [i] for i in range(n)}  # number of a group -> its positions in order
    near = [list(row) for row in similarity]  # between groups: the mean over their members
    while len(groups) > 1:
        numbers = sorted(groups)
        pairs = ((i, j) for at, i in enumerate(numbers) for j in numbers[at + 1 :])
        a, b = max(pairs, key=lambda pair: near[pair[0]][pair[1]])
        size_a, size_b = len(groups[a]), len(groups[b])
        for c in numbers:
            near[a][c] = near[c][a] = (size_a * near[a][c] + size_b * near[b][c]) / (size_a + size_b)
        groups[a] = _joined(groups[a], groups.pop(b), similarity)
    return next(iter(groups.values()), [])


def _joined(left: list[int], right: list[int], similarity: Sequence[Sequence[float]]) -> list[int]:
    ways = [(x, y) for x in (left, left[::-1]) for y in (right, right[::-1])]
    x, y = max(ways, key=lambda way: similarity[way[0][-1]][way[1][0]])
    return x + y
