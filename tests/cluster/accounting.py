"""What stands behind `sacct`: slurmdbd, and a MariaDB without a network that lives in one folder.

The database knows no passwords. Its socket lies in a folder that only root can enter.
"""

from pathlib import Path

PACKAGES = ("mariadb-server-core", "slurmdbd")  # the core alone: no service, no user, nothing in /run
CLUSTER = "pretend"
ACCOUNT = "brics.pretend"

_SYSTEM_TABLES = Path("/usr/share/mysql/mysql_system_tables.sql")


def lay_out(folder: Path) -> None:
    """Make room for an empty database in `folder`."""
    folder.mkdir(mode=0o700)
    (folder / "data").mkdir()
    # slurmdbd wants a stored procedure, which wants a system table; mariadb-install-db would take seconds.
    tables = _SYSTEM_TABLES.read_text(encoding="utf-8")
    (folder / "init.sql").write_text(f"CREATE DATABASE IF NOT EXISTS mysql;\nUSE mysql;\n{tables}", encoding="utf-8")


def socket(folder: Path) -> Path:
    """Where the database listens."""
    return folder / "socket"


def mariadbd(folder: Path) -> list[str]:
    """The command that serves the database in `folder`."""
    return [
        "/usr/sbin/mariadbd",
        "--no-defaults",
        "--user=root",
        f"--datadir={folder / 'data'}",
        f"--socket={socket(folder)}",
        f"--pid-file={folder / 'pid'}",
        f"--init-file={folder / 'init.sql'}",
        "--skip-networking",
        "--skip-grant-tables",
        "--innodb-flush-method=nosync",
        "--innodb-log-file-size=8M",
        "--innodb-buffer-pool-size=16M",
    ]


def slurmdbd(folder: Path) -> list[str]:
    """The command that serves accounting out of that database. It finds slurmdbd.conf beside slurm.conf."""
    # slurmdbd.conf has no word for a socket, so libmariadb is told.
    return ["/usr/bin/env", f"MYSQL_UNIX_PORT={socket(folder)}", "/usr/sbin/slurmdbd", "-D"]


def additions(user: str) -> list[list[str]]:
    """The commands that make the cluster, an account and `user` known."""
    sacctmgr = ["sacctmgr", "--immediate", "--quiet", "add"]
    return [
        [*sacctmgr, "cluster", CLUSTER],
        [*sacctmgr, "account", ACCOUNT, f"Cluster={CLUSTER}"],
        [*sacctmgr, "user", user, f"Account={ACCOUNT}"],
    ]
