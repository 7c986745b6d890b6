"""The app of a site's node: one query, and always a reply."""

import os
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from .journal import keep_journal
from .programs import FOLDER

app = ClientApp()


@app.query("call")
def call(message: Message, context: Context) -> Message:
    """Answer the server's message."""
    from .site import answer, site_of

    folder = Path(os.environ[FOLDER])
    keep_journal(folder / "log" / "site.jsonl")
    return Message(answer(message.content, site_of(folder)), reply_to=message)
