"""What counts as a secret, what is recorded, what an enclosing job leaves behind."""

from __future__ import annotations

import pytest
from stoker.launcher.environment import is_secret, recorded, secrets_in, without_outer_job


@pytest.mark.parametrize(
    "name",
    ["WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "MY_KEY", "OPENAI_APIKEY", "DB_PASSWORD", "PGPASSWORD",
     "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "GH_SECRET", "aws_session_token", "AZURE_CREDENTIALS"],
)  # fmt: skip
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name", ["TOKENIZERS_PARALLELISM", "NCCL_DEBUG", "KEYBOARD", "MONKEY", "SECRETARY", "PATH", "TOKEN_LIMIT"]
)
def test_names_that_only_look_alike(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("export WANDB_API_KEY=abc", ["WANDB_API_KEY"]),
        ("HF_TOKEN='a b' python x.py", ["HF_TOKEN"]),
        ('A=1; export MY_SECRET="x"', ["MY_SECRET"]),
        ("export HF_TOKEN=$(cat ~/.token)", []),
        ('export HF_TOKEN="$HF_TOKEN"', []),
        ("module load cuda/12.8", []),
    ],
)
def test_secrets_written_out_in_a_line(line: str, names: list[str]) -> None:
    assert secrets_in(line) == names


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
