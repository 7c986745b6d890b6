"""An engine without clients: every call is answered at once, with zeros of the size that the reply will have.

What is sent down is what a real run sends, as far as that does not depend on what was learned; what comes up has the
bytes of a real reply, which follow from the question (`wire.Layout`).
"""

from collections.abc import Callable, Iterator, Sequence

from ..core.calls import Call, Reply, Roster
from ..core.wire import Layout, Packed
from .serve import arguments_of


class Dry:
    """Answers for the clients of `roster`. `bounded` are the tasks whose replies may be smaller than these."""

    def __init__(self, roster: Roster):
        self.roster = roster
        self.bounded: set[str] = set()

    def start(self, calls: Sequence[Call]) -> Callable[[], Iterator[Reply]]:
        return lambda: map(self._answer, calls)

    def _answer(self, call: Call) -> Reply:
        task, sent = arguments_of(call)
        layout = Layout(task.returns, sent)
        if not layout.exact:
            self.bounded.add(task.name)
        example = layout.example(self.roster[call.client].num_examples)
        return Reply(call.client, Packed(example, steady=True), call.after)

    def close(self) -> None:
        """Do nothing: nothing was opened."""
