"""The ordinary user that tests act as."""

import pwd
import subprocess

from tests.support import packages

USER = "isambard"


def ordinary_user() -> pwd.struct_passwd:
    """The ordinary user, made if there is none. No password is set, and sshd does not take the account for locked."""
    with packages.machine_lock():
        if all(user.pw_name != USER for user in pwd.getpwall()):
            account = ["--system", "--user-group", "--create-home", "--shell", "/bin/bash"]
            subprocess.run(["useradd", *account, USER], check=True)
        shadow = subprocess.run(["getent", "shadow", USER], capture_output=True, text=True, check=True).stdout
        if shadow.split(":")[1].startswith("!"):
            subprocess.run(["usermod", "--password", "*", USER], check=True)
        return pwd.getpwnam(USER)
