"""slurmdbd and the MariaDB behind it, so that sacct works: files, command lines, and the first entry.

The database listens on a Unix socket in the cluster's private directory and nowhere else, which is why it needs no
password. The keeper starts the programs; nothing here waits.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from .spec import Layout


def data_directory(layout: Layout) -> Path:
    return layout.private / "mysql"


def socket_path(layout: Layout) -> Path:
    return layout.private / "mysql.sock"


def client_environment(layout: Layout) -> dict[str, str]:
    """Where MariaDB's client library, and so slurmdbd, looks for "localhost"."""
    return {"MYSQL_UNIX_PORT": str(socket_path(layout))}


def install_argv(layout: Layout, user: str) -> list[str]:
    """The command that makes an empty database (about half a second; several on a busy disk)."""
    return [
        "mariadb-install-db",
        "--no-defaults",
        f"--user={user}",
        f"--datadir={data_directory(layout)}",
        "--skip-test-db",
        "--auth-root-authentication-method=normal",
        *_common(layout),
    ]


def server_argv(layout: Layout, user: str) -> list[str]:
    return [
        "mariadbd",
        "--no-defaults",
        f"--user={user}",
        f"--datadir={data_directory(layout)}",
        f"--socket={socket_path(layout)}",
        f"--pid-file={layout.run}/mariadbd.pid",
        "--skip-networking",
        "--skip-grant-tables",
        "--skip-log-bin",
        "--skip-name-resolve",
        "--performance-schema=off",
        # What slurmdbd asks for, and no waiting for the disk: the data are thrown away with the cluster.
        "--innodb-buffer-pool-size=128M",
        "--innodb-lock-wait-timeout=900",
        "--innodb-flush-log-at-trx-commit=0",
        "--innodb-flush-method=nosync",
        *_common(layout),
    ]


def _common(layout: Layout) -> list[str]:
    # A server that starts deletes every temporary table in its directory, a running server's too: so not in /tmp.
    return ["--innodb-log-file-size=8M", f"--tmpdir={layout.private}"]


def add_cluster(name: str, environment: Mapping[str, str]) -> None:
    """Tell slurmdbd of the cluster. Raises OSError with what sacctmgr said."""
    argv = [shutil.which("sacctmgr", path=environment["PATH"]) or "sacctmgr", "-i", "-Q", "add", "cluster", name]
    done = subprocess.run(argv, env=dict(environment), capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        raise OSError(f"sacctmgr add cluster {name}: {(done.stderr or done.stdout).strip()}")
