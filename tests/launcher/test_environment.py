"""What is recorded, what an enclosing job leaves behind."""

from __future__ import annotations

from stoker.launcher.environment import recorded, without_outer_job


def test_outer_job_is_taken_away_but_not_where_slurm_is() -> None:
    outer = {
        "SLURM_JOB_ID": "7", "SLURM_NTASKS": "64", "SBATCH_PARTITION": "x", "SRUN_DEBUG": "3", "PMI_RANK": "0",
        "PMIX_RANK": "0", "SLURM_CONF": "/etc/slurm.conf", "PATH": "/bin", "HF_TOKEN": "secret", "STOKER_WARNED": "1",
    }  # fmt: skip
    assert without_outer_job(outer) == {"SLURM_CONF": "/etc/slurm.conf", "PATH": "/bin", "HF_TOKEN": "secret"}


def test_recorded_is_an_allow_list_without_secrets() -> None:
    environment = {
        "NCCL_DEBUG": "INFO", "PATH": "/bin", "HOME": "/root", "HF_TOKEN": "x", "STOKER_API_KEY": "x", "CCACHE": "no",
        "CC": "gcc", "AWS_REGION": "eu",
    }  # fmt: skip
    assert recorded(environment) == {"CC": "gcc", "NCCL_DEBUG": "INFO", "PATH": "/bin"}
