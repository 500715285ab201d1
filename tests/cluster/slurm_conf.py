"""The configuration files of the pretend cluster, as text."""

from pathlib import Path

KILL_WAIT_S = 10

SLURM_CONF = """\
ClusterName=pretend
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/%n.log
MailProg=/bin/true

ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=sched_interval=2,bf_interval=2
JobSubmitPlugins=lua
ReturnToService=2
InactiveLimit=30
KillWait={kill_wait_s}
MinJobAge=300

GresTypes=gpu
SlurmdParameters=config_overrides
NodeName=nid[001-004] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{node_ports}] \
{shape} ThreadsPerCore=1 RealMemory=460000 Gres=gpu:gh200:4
PartitionName={partition} Nodes=ALL Default=YES State=UP MaxTime=24:00:00 DefaultTime=04:00:00 \
DefCpuPerGPU={cpus_per_gpu} DefMemPerGPU=115000
"""

GH200 = {"shape": "CPUs=288 Sockets=4 CoresPerSocket=72", "cpus_per_gpu": 72}
TINY = {"shape": "CPUs=2 Sockets=1 CoresPerSocket=2", "cpus_per_gpu": 1}
"""Nodes whose CPUs this machine has, so that processes can be bound to them."""

ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={accounting_port}
AccountingStoragePass={folder}/munge/socket
AccountingStorageTRES=gres/gpu
"""

SLURMDBD_CONF = """\
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={accounting_port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
PidFile={folder}/run/slurmdbd.pid
LogFile={folder}/log/slurmdbd.log
"""

GRES_CONF = "NodeName=nid[001-004] Name=gpu Type=gh200 File={folder}/dev/nvidia[0-3]\n"

JOB_SUBMIT_LUA = """\
-- A job must ask for GPUs, as on the real machine.
function slurm_job_submit(job, partitions, uid)
    for _, field in ipairs({"tres_per_job", "tres_per_node", "tres_per_socket", "tres_per_task"}) do
        if job[field] ~= nil and string.find(job[field], "gpu") then
            return slurm.SUCCESS
        end
    end
    slurm.log_user("no GPU directive: ask for GPUs with --gpus, --gpus-per-node or --gres")
    return slurm.ERROR
end

function slurm_job_modify(job, record, partitions, uid)
    return slurm.SUCCESS
end
"""


def render(folder: Path, host: str, first_port: int, partition: str, extra: str, accounting: bool, tiny: bool = False
           ) -> dict[str, str]:
    """Return the files that belong in one directory, by name, for a cluster that lives in `folder`.

    The controller listens on `first_port`, the nodes on the four ports after it, and with `accounting` slurmdbd
    on the next. The nodes of a `tiny` cluster have two CPUs, to which task/affinity binds. A line of `extra`
    replaces the one with the same key, or removes it if it gives no value; nodes and partitions are added instead.
    """
    values = {
        "folder": folder,
        "host": host,
        "controller_port": first_port,
        "node_ports": f"{first_port + 1}-{first_port + 4}",
        "accounting_port": first_port + 5,
        "partition": partition,
        "kill_wait_s": KILL_WAIT_S,
        **(TINY if tiny else GH200),
    }
    template = SLURM_CONF + ACCOUNTING if accounting else SLURM_CONF
    if tiny:
        template = template.replace("task/none", "task/affinity")
    files = {
        "slurm.conf": _merge(template.format(**values), extra),
        "gres.conf": GRES_CONF.format(**values),
        "job_submit.lua": JOB_SUBMIT_LUA,
    }
    return files | {"slurmdbd.conf": SLURMDBD_CONF.format(**values)} if accounting else files


def _merge(slurm_conf: str, extra: str) -> str:
    # Of two equal keys Slurm takes the last, but every command complains; it knows no empty value.
    replaced = {_key(line) for line in extra.splitlines()} - {"nodename", "partitionname"}
    kept = [line for line in slurm_conf.splitlines() if not _key(line) or _key(line) not in replaced]
    added = [line for line in extra.splitlines() if not line.rstrip().endswith("=")]
    return "\n".join([*kept, *added, ""])


def _key(line: str) -> str:
    return line.partition("=")[0].strip().lower()
