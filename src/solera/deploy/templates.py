"""The files of a deployment as text."""

APP = """\
# The app of a Solera deployment. It holds no code: both components are installed modules.
[project]
name = "solera-app"
version = "1.0.0"
description = "Runs the federation that the server's own folder describes"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "solera"

[tool.flwr.app.components]
serverapp = "solera.deploy.serverapp:app"
clientapp = "solera.deploy.clientapp:app"

[tool.flwr.app.config]
run = "run"
config = "server.toml"
"""

NO_TASKS = (
    "site.toml lacks sites.{name}.tasks, the tasks that the site answers: run `solera deploy init` with the run's "
    "configuration into another folder, and copy tasks and bounds from the new sites/{name}/site.toml"
)

SERVER_TOML = """\
# What the server runs. It knows of each site its model and its key, not its data.
"""

SITE_TOML = """\
# What this site brings: its own data and model, from its own files. The server never sends code, and nothing that the
# server sends is a path. data, shape and normalisation must agree with the server's; the site's data stays here.
#
# The site answers `tasks` and no others, and no argument outside of `bounds`: a number must lie between the smallest
# and the largest that are listed, a text must be one of those; "own examples" is the number of the training samples
# here, and for "*" (seeds, digests) any value will do. `solera deploy init` took both from the run's configuration.
"""

DEPLOY_SERVER = """\
role = "server"
address = "{address}"  # where it listens; `solera deploy server --address` overrides it
"""

DEPLOY_SITE = """\
role = "site"
name = "{name}"
address = "{address}"  # where the server is, as this site reaches it
"""

README = """\
# A deployment of Solera

Made by `solera deploy init`. Each folder below goes to one machine, with Python and `pip install 'solera[flower]'`.

| folder | for | keep secret |
|---|---|---|
| `ca/` | the person who renews certificates; no running machine needs it | `ca.key` |
| `server/` | the server | `server.key`, `secret` |
{rows}

1. Copy `sites/NAME` to each site, over a channel you trust, and remove it here. Let its people look through `site.toml`
   and set `data` to where their data is.
2. On the server: `solera deploy server server` (it listens at {address}).
3. At each site: `solera deploy client NAME`. It connects to {address} and needs no open port.
4. On the server: `solera deploy submit server --name first --wait`, then
   `solera report server/runs/first -o report.html`.

`solera deploy status server` shows who is connected and how far runs are, `solera deploy logs FOLDER` what happened.
At a site, `log/asked.jsonl` has one line for every question of the server: the task, its arguments, and how many bytes
left the site. A site refuses what `tasks` and `bounds` in its `site.toml` do not name.
A run that was stopped goes on when it is submitted again under the same name.

The server's certificate is valid for {names} until {until}; `solera deploy renew` makes a new one.
"""

UNIT = """\
[Unit]
Description=Solera: {what}
After=network-online.target
Wants=network-online.target

[Service]
User={user}
ExecStart={solera} deploy {command} {folder}
Restart=on-failure
RestartSec=5
KillMode=control-group
TimeoutStopSec=30
NoNewPrivileges=true
PrivateTmp=true
ProtectSystem=strict
ProtectHome=read-only
ReadWritePaths={folder}

[Install]
WantedBy=multi-user.target
"""

COMPOSE_HEAD = """\
# docker compose up: the server and all sites on one machine, to try them out. The image needs `solera[flower]`.
services:
"""

COMPOSE_SERVICE = """\
  {service}:
    image: ${{SOLERA_IMAGE:-solera:latest}}
    command: ["solera", "deploy", "{command}", "/deployment"{more}]
    volumes: ["./{folder}:/deployment"]
    restart: unless-stopped
    read_only: true
    tmpfs: ["/tmp"]
    security_opt: ["no-new-privileges:true"]
"""
