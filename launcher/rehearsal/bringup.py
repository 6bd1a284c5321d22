"""Bring-up of a cluster, step by step, inside the keeper: namespaces, munge, database, controller, nodes.

Every daemon and node is a child of the process that runs this. Taking things down again when a step fails is the
keeper's business.
"""

from __future__ import annotations

import os
import pwd
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from . import config, database, files, linux, network, nodes, processes, programs
from .config import Site
from .spec import ClusterSpec, Layout

# Generous: the machine may be busy with other things. A daemon that dies is noticed at once.
_PATIENCE = 90.0
_INSTALLER = "mariadb-install-db"
CONTROLLER = "slurmctld"


class BringUpError(Exception):
    """Why the cluster did not come up, with the last log lines of the daemon that is to blame."""

    def __init__(self, message: str, log: list[str] | None = None) -> None:
        super().__init__(message)
        self.log = log or []


class Abandoned(Exception):
    """The starter is gone, or told us to stop, before the cluster was up."""


class Daemons:
    """What the keeper has started: running (pid to name) and ended (name to wait status)."""

    def __init__(self, layout: Layout, spec: ClusterSpec) -> None:
        self.layout = layout
        self.spec = spec
        self.running: dict[int, str] = {}
        self.ended: dict[str, int] = {}
        self.environment = {
            "PATH": programs.search_path(spec),
            "HOME": str(Path.home()),
            "LANG": "C.UTF-8",
            "SLURM_CONF": str(layout.slurm_conf),
            processes.MARKER: str(layout.root),
        }

    @property
    def path(self) -> str:
        return self.environment["PATH"]

    def start(self, name: str, argv: list[str], extra: Mapping[str, str] | None = None) -> None:
        environment = {**self.environment, **(extra or {})}
        self.running[processes.spawn(argv, environment, self.layout.log / f"{name}.out")] = name

    def start_controller(self) -> None:
        """With the state that an earlier one has left. Raises ValueError if one runs."""
        if CONTROLLER in self.running.values():
            raise ValueError("slurmctld runs already")
        self.ended.pop(CONTROLLER, None)
        self.start(CONTROLLER, ["slurmctld", "-D"])

    def reap(self) -> None:
        for pid, status in processes.reap():
            if pid in self.running:
                self.ended[self.running.pop(pid)] = status

    def fork_node(self, name: str) -> nodes.Node:
        self.ended.pop(f"node-{name}", None)
        node = nodes.fork_node(nodes.NodePlan(name, self.spec, self.layout, self.environment))
        self.running[node.pid] = f"node-{name}"
        return node

    def connect(self, waiting: Mapping[str, nodes.Node]) -> None:
        """Plug the cables of forked nodes in and let them start their slurmd."""
        if self.spec.isolate:
            pids = {name: node.pid for name, node in waiting.items()}
            network.run_ip(network.cable_commands(self.spec, pids), self.path)
        for node in waiting.values():
            node.go()


class BringUp:
    """One bring-up. `starter` is the socket whose end means that nobody waits for it any more."""

    def __init__(self, daemons: Daemons, starter: socket.socket) -> None:
        self._daemons = daemons
        self._layout = daemons.layout
        self._spec = daemons.spec
        self._starter = starter

    def run(self) -> network.PortClaim:
        """From empty directories to all nodes idle. Raises BringUpError, Abandoned, OSError, ValueError."""
        self._enter_namespaces()
        claim = network.claim_ports(str(self._layout.root))
        site = Site(
            layout=self._layout,
            hostname=socket.gethostname().split(".")[0],
            user=pwd.getpwuid(os.geteuid()).pw_name,
            version=programs.slurm_version(self._daemons.path),
            first_port=claim.first_port,
        )
        files.write_configuration(self._spec, site)
        if self._spec.isolate:
            self._dress_namespaces()
        self._start_munge()
        waiting = {name: self._daemons.fork_node(name) for name in self._spec.node_names()}
        if self._spec.database:
            self._start_database(site)
        self._daemons.start_controller()
        self._wait_until(lambda: network.listens(config.controller_port(site)), CONTROLLER)
        self._daemons.connect(waiting)
        self._wait_until(self._all_idle, CONTROLLER, pause=0.04)
        return claim

    def _enter_namespaces(self) -> None:
        linux.adopt_orphans()
        if not self._spec.isolate:
            return
        wanted = linux.NEW_NETWORK | linux.NEW_MOUNT
        try:
            if os.geteuid() == 0:
                linux.unshare(wanted)
            else:
                linux.new_user_namespace(wanted)
            linux.make_mounts_private()
        except OSError as error:
            who = "root" if os.geteuid() == 0 else "an ordinary user"
            raise BringUpError(
                f"this machine does not let {who} make namespaces ({error}); isolated nodes need them: "
                "bring the cluster up without --isolate"
            ) from None

    def _dress_namespaces(self) -> None:
        """Bridge, name look-up and commands, which every node inherits."""
        network.run_ip(network.bridge_commands(), self._daemons.path)
        for name in ("hosts", "nsswitch.conf", "resolv.conf"):
            if Path("/etc", name).exists():
                linux.bind(str(self._layout.etc / name), f"/etc/{name}")
        files.write_clients(self._layout, self._daemons.path, os.getpid())
        linux.bind(str(self._layout.bin_inside), str(self._layout.bin))

    def _start_munge(self) -> None:
        private = self._layout.private
        argv = [
            "munged",
            "--foreground",
            # It insists on a socket that every user can reach, and ours may well be for one user alone.
            "--force",
            "--num-threads=4",
            f"--key-file={private}/munge.key",
            f"--seed-file={private}/munge.seed",
            f"--socket={self._layout.munge_socket}",
            f"--pid-file={self._layout.run}/munged.pid",
            f"--log-file={self._layout.log}/munged.log",
        ]
        self._daemons.start("munged", argv)
        self._wait_until(self._layout.munge_socket.exists, "munged")

    def _start_database(self, site: Site) -> None:
        layout, daemons = self._layout, self._daemons
        daemons.start(_INSTALLER, database.install_argv(layout, site.user))
        self._wait_until(lambda: _INSTALLER in daemons.ended, _INSTALLER)
        daemons.start("mariadbd", database.server_argv(layout, site.user))
        self._wait_until(database.socket_path(layout).exists, "mariadbd")
        daemons.start("slurmdbd", ["slurmdbd", "-D"], database.client_environment(layout))
        self._wait_until(lambda: network.listens(config.database_port(site)), "slurmdbd")
        database.add_cluster(config.cluster_name(layout), daemons.environment)

    def _all_idle(self) -> bool:
        for name in self._spec.node_names():
            failure = nodes.failure_file(self._layout, name)
            if failure.exists():
                raise BringUpError(failure.read_text().strip(), files.log_tail(self._layout, f"slurmd-{name}"))
        argv = [shutil.which("sinfo", path=self._daemons.path) or "sinfo", "-h", "-p", "main", "-o", "%D %t"]
        done = subprocess.run(argv, env=self._daemons.environment, capture_output=True, text=True, check=False)
        return done.stdout.split() == [str(self._spec.nodes), "idle"]

    def _wait_until(self, ready: Callable[[], bool], blamed: str, pause: float = 0.01) -> None:
        deadline = time.monotonic() + _PATIENCE
        while True:
            self._daemons.reap()
            for name, status in self._daemons.ended.items():
                if status != 0 or name != _INSTALLER:
                    raise BringUpError(f"{name} {_how_it_ended(status)}", files.log_tail(self._layout, name))
            if ready():
                return
            if time.monotonic() > deadline:
                tail = files.log_tail(self._layout, blamed)
                raise BringUpError(f"{blamed} was not ready after {_PATIENCE:.0f} s", tail)
            if select.select([self._starter], [], [], pause)[0]:
                raise Abandoned


def _how_it_ended(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"ended with status {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
