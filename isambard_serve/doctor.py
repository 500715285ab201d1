"""What must be true before a first submission: one check each, with the remedy where it is not.

Each check judges what was found and looks at nothing itself; :func:`examine` does the looking.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from isambard_serve import __version__, directives, health, launch, process, shipped
from isambard_serve import plan as plans
from isambard_serve.errors import HostError, NoProgramError, ServeError, UsageError
from isambard_serve.health import BadNode
from isambard_serve.recipe import Recipe, seconds
from isambard_serve.records import Record
from isambard_serve.run import new_id
from isambard_serve.site import Site
from isambard_serve.slurm import Slurm
from isambard_serve.state import SILENCE_S

if TYPE_CHECKING:
    from isambard_serve.ssh.keys import Certificate

OLDEST_PYTHON = (3, 11)
COMMANDS = ("sbatch", "squeue", "scancel", "scontrol", "sacct", "srun")
FULL_BYTES = 1 << 30
"""A run leaves some tens of MiB, with a profile some hundreds: with less free than this the next one may not fit."""

LOW_BYTES = 10 * FULL_BYTES
SKEW_S = 5.0
"""How far this machine's clock and the shared file system's may differ before it is worth a word."""

SOON_S = 3600.0
"""A certificate that ends within the hour may not last for a submission and a look at it."""

FAR_S = 4e9
"""Later than any certificate that is meant to end; one that never does says 2**64 - 1."""

TRY_S = 300
"""How long the job takes that is tried where no recipe is named."""

RENEW = "run `clifton auth` (or what else renews your certificate)"
LOGIN_S = 60.0
_MEMORY = ("devtmpfs", "ramfs", "tmpfs")
_DISKS = ("btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "xfs", "zfs")


class Check(Record, frozen=True):
    """One thing that was looked at. ``warn``: it may be good enough, or could not be told."""

    name: str
    state: Literal["ok", "warn", "fail"]
    found: str
    remedy: str | None = None


def failed(name: str, error: ServeError) -> Check:
    """The check that ended with ``error``."""
    return Check(name=name, state="fail", found=f"{error.where}: {error.what}" if error.where else error.what,
                 remedy=error.remedy)


def python(version: Sequence[int], prefix: str) -> Check:
    """Is the Python that all jobs will use, installed in ``prefix``, new enough?"""
    found = f"{'.'.join(map(str, version))} in {prefix}, isambard-serve {__version__}"
    if tuple(version) < OLDEST_PYTHON:
        return Check(name="python", state="fail", found=found, remedy="install this package with Python 3.11 or newer")
    return Check(name="python", state="ok", found=found)


def certificate(found: Sequence[Certificate], now: float) -> Check:
    """Is the SSH certificate good for long enough, if there is one? The time is this machine's."""
    if not found:
        return Check(name="certificate", state="ok", found="none: a key alone logs in")
    last = min(found, key=lambda each: each.valid_before)
    until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(min(last.valid_before, FAR_S)))
    if now >= last.valid_before:
        return Check(name="certificate", state="fail", found=f"{last.file} expired at {until}", remedy=RENEW)
    if now < max(each.valid_after for each in found):
        return Check(name="certificate", state="fail", found=f"{last.file} is not valid yet",
                     remedy="look at this machine's clock")
    state: Literal["ok", "warn"] = "ok" if last.valid_before - now > SOON_S else "warn"
    return Check(name="certificate", state=state, found=f"{last.file}, until {until}",
                 remedy=None if state == "ok" else RENEW)


def commands(missing: Sequence[str]) -> Check:
    """Are Slurm's commands on the PATH?"""
    if missing:
        return Check(name="commands", state="fail", found=f"not on the PATH: {', '.join(missing)}",
                     remedy="is this a login node of the site? (--site names another)")
    return Check(name="commands", state="ok", found=", ".join(COMMANDS))


def controller(answer: str | HostError) -> Check:
    """Does Slurm's controller answer, by ``scontrol ping``?"""
    remedy = "wait, and look at the site's service status"
    if isinstance(answer, HostError):
        return Check(name="slurm", state="fail", found=answer.what, remedy=remedy)
    state: Literal["ok", "fail"] = "ok" if re.search(r"\bUP\b", answer) else "fail"
    return Check(name="slurm", state=state, found=" ".join(answer.split()), remedy=None if state == "ok" else remedy)


def accounting(error: HostError | None) -> Check:
    """Does the accounting answer? Runs work without it."""
    if error:
        return Check(name="accounting", state="warn", found=f"does not answer: {error.what}",
                     remedy="nothing to do: node-hours are then those of the run's own clock")
    return Check(name="accounting", state="ok", found="sacct answers")


def account(associations: str | HostError, site: Site) -> Check:
    """May this user use the site file's account and QoS?

    Args:
        associations: lines of ``account|partition|qos,qos`` as ``sacctmgr -nP show associations`` prints them.
    """
    if isinstance(associations, HostError):
        return Check(name="account", state="warn", found=f"cannot be told: {associations.what}")
    rows = [[*line.split("|"), "", "", ""][:3] for line in associations.splitlines() if line.strip()]
    wanted = {"account": site.directives.account, "qos": site.directives.qos}
    known = {"account": sorted({row[0] for row in rows}),
             "qos": sorted({qos for row in rows for qos in row[2].split(",") if qos})}
    for key, value in wanted.items():
        if value is not None and value not in known[key]:
            return Check(name="account", state="fail", found=f"{key} {value} is none of yours",
                         remedy=f"set directives.{key} in the site file to one of: {', '.join(known[key]) or 'none'}")
    if not rows:
        return Check(name="account", state="warn", found="you have no account here that the accounting knows",
                     remedy="ask whoever runs your project to add you")
    return Check(name="account", state="ok", found=f"account {wanted['account'] or ', '.join(known['account'])}, "
                                                   f"qos {wanted['qos'] or ', '.join(known['qos'])}")


def quality(partition: str, site: Site) -> str | None:
    """The QoS whose limits hold for a job: the site file's, or that of its partition (``scontrol show partition``)."""
    own = re.search(r"\bQoS=(\S+)", partition)
    return site.directives.qos or (own[1] if own and own[1] != "N/A" else None)


def time_limit(what: str, time_s: int, partition: str, qos: str) -> Check:
    """May the job ``what`` take ``time_s``? Slurm lets a longer one wait for ever.

    Args:
        partition: ``scontrol show partition``.
        qos: the QoS's line of ``name|maxwall`` as ``sacctmgr -nP show qos`` prints it.
    """
    name = f"time of {what}"
    of_partition = re.search(r"\bMaxTime=(\S+)", partition)
    limits = {"its partition": of_partition[1] if of_partition else "", "its QoS": qos.strip().rpartition("|")[2]}
    for whose, limit in limits.items():
        with contextlib.suppress(UsageError):  # UNLIMITED, or none
            if time_s > seconds(limit, whose):
                return Check(name=name, state="fail", found=f"{directives.clock(time_s)}, {whose} allows {limit}",
                             remedy="shorten it with --time, or resources.time in the recipe")
    return Check(name=name, state="ok", found=directives.clock(time_s))


def filesystem(name: str, path: str, kind: str, site: Site) -> Check:
    """Do compute nodes see ``path``, which is on a file system of this ``kind``?"""
    if site.scheduler == "local" or kind not in (*_MEMORY, *_DISKS):
        return Check(name=name, state="ok", found=f"{path} ({kind})")
    found = f"{path} is on a file system of this machine alone ({kind})"
    if kind in _MEMORY:
        return Check(name=name, state="fail", found=found, remedy="use a folder on the site's shared file system")
    return Check(name=name, state="warn", found=found, remedy="it must be there on the compute nodes too")


def space(free_bytes: int, whose: str) -> Check:
    """Is there room for a run's files?"""
    found = f"{free_bytes / FULL_BYTES:,.1f} GiB free, {whose}"
    if free_bytes >= LOW_BYTES:
        return Check(name="space", state="ok", found=found)
    return Check(name="space", state="fail" if free_bytes < FULL_BYTES else "warn", found=found,
                 remedy="delete what is not needed (old runs among it), or name another runs_dir")


def clock(skew_s: float) -> Check:
    """Do this machine and the shared file system agree on the time, so that a silence can be told from an old file?"""
    found = f"{abs(skew_s):.1f} s between this machine's and the file system's"
    if abs(skew_s) <= SKEW_S:
        return Check(name="clock", state="ok", found=found)
    return Check(name="clock", state="fail" if abs(skew_s) > SILENCE_S else "warn", found=found,
                 remedy="tell the site: one of them is wrong")


def bad_nodes(nodes: Sequence[BadNode]) -> Check:
    """Which nodes were found bad of late?"""
    if not nodes:
        return Check(name="bad nodes", state="ok", found="none of late")
    return Check(name="bad nodes", state="warn", remedy="nothing to do: jobs leave them out; tell the site",
                 found="; ".join(f"{bad.node} ({', '.join(bad.faults)})" for bad in nodes))


def numactl(there: bool, wanted: bool) -> Check:
    """Is ``numactl`` there for recipes that bind the engine's memory?"""
    if there or not wanted:
        return Check(name="numactl", state="ok", found="there" if there else "no recipe here asks for it")
    return Check(name="numactl", state="warn", found="not on the PATH here; the compute nodes are what counts",
                 remedy="without it there the engine's memory is not bound: submit --no-numa-bind says so openly")


def kind_of(path: Path, mountinfo: str) -> str:
    """The kind of the file system that ``path`` (resolved) lies on, by the lines of ``/proc/self/mountinfo``."""
    best, kind = "", "unknown"
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) < 5 or not after:
            continue
        point = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), fields[4])
        if len(point) >= len(best) and path.is_relative_to(point):
            best, kind = point, after.split(" ")[0]
    return kind


def quota_left(said: str) -> int | None:
    """The bytes that a Lustre quota leaves; None if it has none.

    Args:
        said: the line of ``lfs quota -q``: file system, KiB used, quota, limit, grace, and the same of files
            (lfs-quota(1)). A ``*`` marks what is over its quota.
    """
    fields = [field.rstrip("*") for field in said.split()[1:4]]
    if len(fields) < 3 or not all(field.isdigit() for field in fields) or fields[2] == "0":
        return None
    return max(0, int(fields[2]) - int(fields[0])) * 1024


def examine(site: Site, recipes: Sequence[Recipe], env: Mapping[str, str], slurm: Slurm | None,
            runner: process.Runner = process.run) -> Iterator[Check]:
    """Looks at everything that a submission of ``recipes`` at ``site`` (variables resolved) needs from here.

    Args:
        env: the variables that programs get.
        slurm: its commands; None where the site has none.
        runner: runs what is not Slurm's.
    """
    yield python(sys.version_info[:3], sys.prefix)
    mounts = Path("/proc/self/mountinfo").read_text() if Path("/proc/self/mountinfo").exists() else ""
    yield filesystem("installation", sys.prefix, kind_of(Path(sys.prefix).resolve(), mounts), site)
    yield from _folder(Path(site.runs_dir), mounts, site, env, runner)
    made = []
    for recipe in recipes:
        try:
            made.append(plans.make(recipe, site, run_id=new_id(recipe.name), runs_dir=site.runs_dir,
                                   python=sys.executable))
        except UsageError as error:
            yield failed(f"recipe {recipe.name}", error)
    if slurm:
        yield from _slurm(site, made, slurm, env)
        yield bad_nodes(health.bad_nodes(Path(site.runs_dir)))
    yield from _needs(site, made, env)


def _into(site: Site) -> str:
    """How something comes into the site's file of one's own, whether it is there already or not."""
    own = shipped.user_folder() / "sites" / f"{site.name}.yaml"
    return f"give {own}" if own.is_file() else f"write {own} with `extends: {site.name}` and"


def _folder(runs_dir: Path, mounts: str, site: Site, env: Mapping[str, str], runner: process.Runner
            ) -> Iterator[Check]:
    """The runs' folder, or where it will be made: can it be written, is it shared, has it room and the right time?"""
    # os.path, not Path: a folder that may not be entered is no error here.
    there = next(path for path in (runs_dir, *runs_dir.parents) if os.path.exists(path))
    try:
        with tempfile.NamedTemporaryFile(dir=there) as trial:
            trial.write(b"x")
            trial.flush()
            skew_s = os.stat(trial.name).st_mtime - time.time()
    except OSError as error:
        yield Check(name="runs_dir", state="fail", found=f"{runs_dir} cannot be written: {error.strerror}",
                    remedy=f"{_into(site)} another runs_dir")
        return
    kind = kind_of(there.resolve(), mounts)
    yield filesystem("runs_dir", str(runs_dir), kind, site)
    free, whose = shutil.disk_usage(there).free, "by the file system"
    if kind == "lustre":
        left = _lustre_quota(there, env, runner)
        # `df` shows the whole of it; what stops a write is the project's quota.
        free, whose = (free, "but the quota cannot be told") if left is None else (left, "by the project's quota")
    yield space(free, whose)
    yield clock(skew_s)


def way(alias: str) -> Iterator[Check]:
    """Looks at the way to the login node ``alias``: the certificates on it, and whether it lets us in."""
    from isambard_serve import host
    from isambard_serve.ssh import keys

    try:
        hops = host.resolve(alias)
        yield certificate([each for hop in hops for each in keys.certificates(hop)], time.time())
        with host.connected(alias) as there:
            there.run(["true"], timeout_s=LOGIN_S)
    except ServeError as error:
        yield failed("login", error)
    else:
        yield Check(name="login", state="ok", found=" → ".join(f"{hop.user}@{hop.hostname}" for hop in hops))


def _lustre_quota(folder: Path, env: Mapping[str, str], runner: process.Runner) -> int | None:
    try:
        project = runner(["lfs", "project", "-d", str(folder)], env=env).stdout.split()[0]
        return quota_left(runner(["lfs", "quota", "-q", "-p", project, str(folder)], env=env).stdout)
    except (HostError, IndexError):
        return None


def _slurm(site: Site, made: Sequence[plans.Plan], slurm: Slurm, env: Mapping[str, str]) -> Iterator[Check]:
    missing = [command for command in COMMANDS if shutil.which(command, path=env.get("PATH")) is None]
    yield commands(missing)
    if missing:
        return
    answer = _asked(slurm, "scontrol", "ping")
    yield controller(answer)
    if isinstance(answer, HostError):
        return
    said = _asked(slurm, "sacct", "-nPX", "--format=JobID")
    yield accounting(said if isinstance(said, HostError) else None)
    yield account(_asked(slurm, "sacctmgr", "-nP", "show", "associations", "where", f"user={env.get('USER', '')}",
                         "format=account,partition,qos"), site)
    named = [site.partition] if site.partition else []
    partition = _text(_asked(slurm, "scontrol", "show", "partition", "-o", *named))
    qos = quality(partition, site)
    limits = _text(_asked(slurm, "sacctmgr", "-nP", "show", "qos", qos, "format=name,maxwall")) if qos else ""
    trial = directives.holder_directives(site, "isambard-serve-doctor", site.runs_dir, "doctor.log", site.sweep.gpus,
                                         TRY_S)
    jobs = [(f"recipe {plan.recipe}", plan.serve_directives, plan.limits.time_s) for plan in made]
    for what, asked, time_s in jobs or [("a small job", trial, TRY_S)]:
        yield time_limit(what, time_s, partition, limits)
        try:
            slurm.accepts(directives.words(asked), what)
        except HostError as error:
            yield Check(name=f"job of {what}", state="fail", found=error.what, remedy=error.remedy)
        else:
            yield Check(name=f"job of {what}", state="ok", found="Slurm would take it")


def _asked(slurm: Slurm, *argv: str) -> str | HostError:
    try:
        return slurm.ask(*argv)
    except HostError as error:
        return error


def _text(answer: str | HostError) -> str:
    return "" if isinstance(answer, HostError) else answer


def _needs(site: Site, made: Sequence[plans.Plan], env: Mapping[str, str]) -> Iterator[Check]:
    """The container's program, and what the recipes need: images, weights, overlays."""
    runtime = site.container.runtime
    if runtime in ("apptainer", "podman-hpc"):
        there = shutil.which(runtime, path=env.get("PATH"))
        yield Check(name="container", state="ok" if there else "fail",
                    found=there or f"{runtime} is not on the PATH",
                    remedy=None if there else f"load what has it, or name another container.runtime for {site.name}")
    for plan in made:
        for need in plan.needs:
            name = f"{need.what.removeprefix('the ')} of {plan.recipe}"
            try:
                launch.check_needs([need])
            except NoProgramError:
                continue  # its program is missing, and was named
            except ServeError as error:
                yield failed(name, error)
            else:
                yield Check(name=name, state="ok", found=need.path or "there")
    if site.scheduler == "slurm":
        yield numactl(shutil.which("numactl", path=env.get("PATH")) is not None, any(plan.numa_bind for plan in made))
