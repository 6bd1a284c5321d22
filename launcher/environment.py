"""Environment variables: what is taken away before a submission, what is recorded, what counts as a secret.

Owns: three lists of names. Slurm hands the submitter's environment to the job, so secrets travel there and only there:
never in a script, the run directory or an argument.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping

_SECRET = re.compile(
    r"(?:^|_)(?:API_?KEY|ACCESS_KEY|KEY|SECRET|TOKEN|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?)S?$|"
    r"(?:APIKEY|PASSWORD|SECRET_ACCESS_KEY|ACCESS_KEY_ID)$",
    re.IGNORECASE,
)
# `export NAME=value` in a set-up line, with the value written out (not taken from a variable or a command).
_ASSIGNMENT = re.compile(r"(?:^|[\s;&])([A-Za-z_][A-Za-z0-9_]*)=(\"[^\"$`]+|'[^']+|[^\s\"'$`;&]+)")
_OUTER_JOB = ("SLURM_*", "SLURMD_*", "SBATCH_*", "SRUN_*", "SALLOC_*", "PMI_*", "PMI2_*", "PMIX_*", "STOKER_WARNED")
_OUTER_JOB_STAYS = ("SLURM_CONF", "SLURM_SACK_KEY")

# Recorded in env.json: what explains a difference between two machines or two days.
_RECORDED = (
    "CC", "CONDA_DEFAULT_ENV", "CONDA_PREFIX", "CUBLAS_*", "CUDA_*", "CXX", "FI_*", "GLOO_*", "HF_HOME",
    "HF_HUB_OFFLINE", "HIP_*", "HOSTNAME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "LD_PRELOAD", "LOADEDMODULES",
    "MALLOC_*", "MKL_*", "MODULEPATH", "NCCL_*", "NVIDIA_*", "NVTE_*", "OMP_*", "PATH", "PYTHONPATH", "PYTORCH_*",
    "ROCR_*", "SLURM_CONF", "STOKER_*", "TMPDIR", "TORCHINDUCTOR_*", "TORCH_*", "TRITON_*", "TZ", "UCX_*",
    "VIRTUAL_ENV", "WANDB_DIR", "WANDB_MODE", "WANDB_PROJECT",
)  # fmt: skip


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def is_secret(name: str) -> bool:
    """Whether a variable of this name is taken to hold a key, token or password."""
    return _SECRET.search(name) is not None


def secrets_in(line: str) -> list[str]:
    """Names of secrets whose value is written out in a shell line: `export HF_TOKEN=abc`, not `HF_TOKEN=$(cat f)`."""
    return [m[1] for m in _ASSIGNMENT.finditer(line) if is_secret(m[1])]


def without_outer_job(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with the traces of an enclosing Slurm job removed; they would bend what sbatch asks for."""
    return {
        name: value for name, value in environment.items() if name in _OUTER_JOB_STAYS or not _matches(name, _OUTER_JOB)
    }


def recorded(environment: Mapping[str, str]) -> dict[str, str]:
    """What env.json keeps of it, sorted; an allow-list, and never anything that looks like a secret."""
    return {n: environment[n] for n in sorted(environment) if _matches(n, _RECORDED) and not is_secret(n)}
