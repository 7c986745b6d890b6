"""The app of the server: runs the federation that the server's own folder describes."""

import os
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from .journal import keep_journal
from .programs import FOLDER, INSECURE

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Begin or resume the run that was submitted."""
    from .conduct import conduct

    folder = Path(os.environ[FOLDER])
    name, config = str(context.run_config["run"]), str(context.run_config["config"])
    keep_journal(folder / "log" / "server.jsonl", run=name[:64])
    conduct(grid, folder, name, config, insecure=INSECURE in os.environ)
