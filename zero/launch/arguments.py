"""The command line of `zero run`: the flags of the `deepspeed` command, and the same meaning."""

from __future__ import annotations

import argparse
import shutil

from offload.errors import ConfigError

DEFAULT_HOSTFILE = "/job/hostfile"  # Read if it exists, as by the deepspeed command.
DEFAULT_PORT = 29500  # For a job on several nodes; on one node a free port is used.
LAUNCHERS = ("pdsh", "ssh", "slurm", "mpi", "mpich", "mvapich", "impi", "local")
REFUSED = {
    "elastic_training": "the number of nodes is fixed; use --max_restarts N, which starts the same ranks again",
    "min_elastic_nodes": "the number of nodes is fixed; name it with --num_nodes",
    "max_elastic_nodes": "the number of nodes is fixed; name it with --num_nodes",
    "save_pid": "the launcher stays in the foreground; use the process id of this command",
    "venv_script": "the launcher starts the same Python on every node; install the environment there under the same "
    "path",
}
REFUSED_WITH_VALUE = ("venv_script", "min_elastic_nodes", "max_elastic_nodes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all flags, each with underscores and with dashes."""

    def add(*names: str, **more: object) -> None:
        forms = [form for name in names for form in (name, "--" + name[2:].replace("_", "-"))]
        parser.add_argument(*dict.fromkeys(forms), **more)  # type: ignore[arg-type]

    parser.add_argument(
        "-H", "--hostfile", metavar="FILE", help=f"lines HOST slots=N ({DEFAULT_HOSTFILE} if it exists)"
    )
    parser.add_argument("-i", "--include", default="", metavar="SLOTS", help="such as worker-1@worker-2:0,1")
    parser.add_argument("-e", "--exclude", default="", metavar="SLOTS", help="slots to leave out, in the same form")
    add("--num_nodes", type=int, metavar="N", help="use the first N hosts")
    gpus = "ranks per node, one for each of the first N visible GPUs; without GPUs, N ranks on the CPU (1)"
    add("--num_gpus", "--num_accelerators", type=int, metavar="N", help=gpus)
    add("--master_addr", default="", metavar="HOST", help="address of node 0 (its name in the hostfile)")
    port = f"port of node 0 (a free port on one node, {DEFAULT_PORT} on several)"
    add("--master_port", type=int, metavar="PORT", help=port)
    launchers = "pdsh, ssh, slurm, mpi (also openmpi, mpich, mvapich, impi, nossh), or local (nodes reached by "
    launchers += "the prefix in --launcher_args); default: pdsh if it is installed, else ssh"
    parser.add_argument("--launcher", help=launchers)
    add(
        "--launcher_args",
        default="",
        metavar="WORDS",
        help="more arguments for the launcher; in a prefix, {host} is replaced by the host",
    )
    add("--ssh_port", type=int, metavar="PORT", help="port of the ssh servers")
    add("--no_ssh", action="store_true", help="start only this node's ranks; run the same command once on every node")
    add("--node_rank", type=int, metavar="N", help="with --no_ssh: the number of this node, from 0")
    add("--force_multi", action="store_true", help="use the launcher even for a single host")
    add("--module", action="store_true", help="the script is a module, as with python -m")
    add("--no_python", action="store_true", help="the script is an executable program, not a Python script")
    add("--no_local_rank", action="store_true", help="do not pass --local_rank=i to the script")
    add("--bind_cores_to_rank", action="store_true", help="bind each rank to its own cores")
    add("--bind_core_list", metavar="CORES", help="cores to distribute, such as 0-7,16 (all usable cores)")
    add("--max_restarts", type=int, default=0, metavar="N", help="restart all ranks up to N times after a failure (0)")
    add("--enable_each_rank_log", metavar="FOLDER", help="write each rank's output to files in this folder")
    tuning = "run a few steps under several configurations and write the best one; run: then train with it"
    add("--autotuning", choices=("tune", "run"), help=tuning)
    add("--log_level", choices=("debug", "info", "warning", "error", "critical"), help="accepted, without effect")
    parser.add_argument("-q", "--quiet", action="store_true", help="accepted, without effect")
    add("--comment", default="", help="for slurm")
    add("--account", default="", help="for slurm")
    add("--no_ssh_check", action="store_true", help=argparse.SUPPRESS)
    for name in REFUSED:
        form = {} if name in REFUSED_WITH_VALUE else {"action": "store_const", "const": "yes"}
        add(f"--{name}", **form, help=argparse.SUPPRESS)
    parser.add_argument("script", metavar="SCRIPT", help="the script that each rank runs")
    parser.add_argument("script_args", metavar="...", nargs=argparse.REMAINDER, help="arguments of the script")


def check_arguments(options: argparse.Namespace) -> None:
    """Choose the launcher in place, and check the flags. Raises ConfigError: names the wrong flag and the remedy."""
    for name, reason in REFUSED.items():
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name}: not available: {reason}; leave it out")
    _choose_launcher(options)
    if options.module and options.no_python:
        raise ConfigError("--module and --no_python: expected one of them, got both; a module needs Python")
    if (options.num_nodes is not None or options.num_gpus is not None) and (options.include or options.exclude):
        raise ConfigError(
            "--num_nodes and --num_gpus with --include or --exclude: expected one way to say which slots, got both; "
            "put the numbers into --include"
        )
    for name in ("master_port", "ssh_port"):
        number = getattr(options, name)
        if number is not None and not 0 < number < 1 << 16:
            raise ConfigError(f"--{name}: expected 1 to 65535, got {number}; leave it out to have one chosen")
    if options.max_restarts < 0:
        raise ConfigError(f"--max_restarts: expected at least 0, got {options.max_restarts}")
    if options.node_rank is not None and not options.no_ssh:
        raise ConfigError("--node_rank: expected together with --no_ssh, got it alone; add --no_ssh or leave it out")
    if options.no_ssh and options.node_rank is None:
        raise ConfigError("--no_ssh: expected --node_rank N too, got none; add the number of this node, from 0")


def _choose_launcher(options: argparse.Namespace) -> None:
    name = ("pdsh" if shutil.which("pdsh") else "ssh") if options.launcher is None else options.launcher.lower()
    if name == "nossh":
        options.no_ssh = True
    options.launcher = {"openmpi": "mpi", "nossh": "local"}.get(name, name)
    if options.launcher not in LAUNCHERS:
        raise ConfigError(
            f"--launcher: expected one of {', '.join(LAUNCHERS)}, openmpi, nossh, got {name!r}; or start every node "
            "yourself with --no_ssh --node_rank N"
        )
