"""`zero run` itself: from flags to a job, and the job started here or through a launcher."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

from offload.accelerator import device_count
from offload.errors import ConfigError
from zero.launch.arguments import check
from zero.launch.commands import Transport, build_commands
from zero.launch.exported_variables import for_other_nodes
from zero.launch.head import run_commands
from zero.launch.job import is_remote, plan_job
from zero.launch.node import run_node


def launch(options: argparse.Namespace) -> int:
    """Run the program on all ranks of the job, or of this node with --no_ssh.

    Returns the exit status: 0, or that of the first rank that failed. Raises ConfigError: a flag or file that cannot
    be; says where, what was expected and what to do. `options`: from `zero.launch.arguments.add_arguments`.
    """
    check(options)
    job = plan_job(options, device_count())
    if not is_remote(options, job):
        return run_node(job, options.node_rank or 0)
    try:
        more = tuple(shlex.split(options.launcher_args))
    except ValueError as error:
        raise ConfigError(f"--launcher_args {options.launcher_args}: expected words of a shell: {error}") from error
    transport = Transport(options.launcher, more, options.ssh_port, options.comment, options.account)
    variables = for_other_nodes(os.environ, Path.cwd(), Path.home())
    commands = build_commands(job, transport, variables, str(Path.cwd()), as_root=os.geteuid() == 0)
    return run_commands(commands)
