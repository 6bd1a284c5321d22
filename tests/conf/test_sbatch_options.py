"""The table of sbatch's options, and what is said about one that cannot be given."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from stoker.conf.sbatch_options import OPTIONS, OURS, SWITCHES, WITH_VALUE, problem_with

JUDGED = {
    ("mail-type", "FAIL"): None,
    ("gres", "gpu:a100:4"): None,
    ("hold", ""): None,
    ("hold", "true"): None,
    ("nice", ""): None,
    ("nice", "100"): None,
    ("dependency", "afterok:1"): None,
    ("mail_type", "FAIL"): "no long option of sbatch; did you mean mail-type?",
    ("--comment", "x"): "no long option of sbatch; did you mean comment?",
    ("J", "x"): "no long option of sbatch (they are written without dashes)",
    ("hold", "5"): "takes no value; leave it empty",
    ("mail-type", ""): "needs a value",
    ("nodes", "3"): "set by stoker; use cluster.nodes",
    ("signal", "USR1"): "set by stoker; use resilience.warning",
    ("requeue", ""): "set by stoker; use resilience.continuation=requeue",
    ("array", "0-3"): "set by stoker; a run is one job; leave it out",
}


@pytest.mark.parametrize(("option", "value"), JUDGED)
def test_an_option_is_judged(option: str, value: str) -> None:
    assert problem_with(option, value) == JUDGED[option, value]


def test_options_that_are_ours_are_options() -> None:
    assert set(OURS) <= OPTIONS


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
