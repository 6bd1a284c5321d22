"""The table of sbatch's options, and what is said about one that cannot be given."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
from pathlib import Path

import pytest
from stoker.conf.sbatch_options import OPTIONS, OURS, SWITCHES, TYPED, WITH_VALUE, problem_with
from stoker.conf.schema import ClusterConfig

JUDGED = {
    ("deadline", "now+1day"): None,
    ("hold", ""): None,
    ("hold", "true"): None,
    ("time-min", "4:00:00"): None,
    ("gpu-bind", None): None,
    ("deadlin", "1"): "no long option of sbatch; did you mean deadline?",
    ("deadlin", None): "no long option of sbatch; did you mean deadline?",
    ("--hint", "x"): "no long option of sbatch; did you mean hint?",
    ("mail_type", "FAIL"): "no long option of sbatch; for mail-type use cluster.mail_type",
    ("J", "x"): "no long option of sbatch (they are written without dashes)",
    ("hold", "5"): "takes no value; leave it empty",
    ("deadline", ""): "needs a value",
    ("nodes", "3"): "set by stoker; use cluster.nodes",
    ("nodes", None): None,
    ("mem-per-gpu", "80G"): "set by stoker; use cluster.mem_per_gpu",
    ("signal", "USR1"): "set by stoker; use resilience.warning",
    ("requeue", ""): "set by stoker; use resilience.continuation=requeue",
    ("cpus-per-gpu", "4"): "set by stoker; excludes the cpus-per-task that stoker sets; use cluster.cpus_per_task",
    ("array", "0-3"): "set by stoker; a run is one job; leave it out",
    ("gpus-per-node", "8"): "set by stoker; use cluster.gpus_per_node=8",
    ("gpus-per-node", "h100:8"): "set by stoker; use cluster.gpus_per_node=8 cluster.gpu_type=h100",
    ("gpus-per-node", "a100:4,h100:4"): "set by stoker; use cluster.gpus_per_node and cluster.gpu_type",
    ("gres", "gpu:a100:4"): "set by stoker; use cluster.gpus_per_node=4 cluster.gpu_type=a100",
    ("gres", "gpu:4,nvme:1"): "set by stoker; use cluster.gpus_per_node and cluster.gpu_type, and cluster.gres for "
    "what is no GPU; cluster.gpu_request=gres asks for both in this way",
    ("dependency", "afterok:1"): "set by stoker; use `stoker launch --after`: what a run waited for is no part of it "
    "when it goes on",
}  # fmt: skip


@pytest.mark.parametrize(("option", "value"), JUDGED)
def test_an_option_is_judged(option: str, value: str | None) -> None:
    assert problem_with(option, value) == JUDGED[option, value]


def test_options_that_are_ours_are_options() -> None:
    assert set(OURS) <= OPTIONS


def test_typed_options_are_fields_of_the_cluster() -> None:
    assert set(TYPED.values()) <= {field.name for field in dataclasses.fields(ClusterConfig)}
    assert set(TYPED) <= OPTIONS


@pytest.mark.slurm
def test_the_table_knows_the_installed_sbatch(tmp_path: Path) -> None:
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=none\nSlurmctldHost=localhost\nNodeName=n1\nPartitionName=p Nodes=n1\n")

    def sbatch(*arguments: str) -> str:
        environment = os.environ | {"SLURM_CONF": str(conf)}
        done = subprocess.run(["sbatch", *arguments], env=environment, capture_output=True, text=True, timeout=30)
        return done.stdout + done.stderr

    here = set(re.findall(r"^ +(?:-\w,? +)?--([a-z][a-z-]+)", sbatch("--help"), re.MULTILINE))
    assert len(here) > 80
    assert here - OPTIONS == set()
    for option in sorted(here):
        takes_none = "doesn't allow an argument" in sbatch(f"--{option}=x", "--no-such-option")
        needs_one = f"'--{option}' requires an argument" in sbatch(f"--{option}")
        if option not in ("get-user-env", "requeue"):  # these differ between versions
            assert (takes_none, needs_one) == (option in SWITCHES, option in WITH_VALUE), option
