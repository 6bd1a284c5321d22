"""Environment variables: what is taken away before a submission, what is recorded, what counts as a secret.

Owns: three lists of names. Slurm hands the submitter's environment to the job, so secrets travel there and only there:
never in a script, the run directory or an argument.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# Compiled where they are used: status imports this module and must answer at once.
_SECRET = r"(?:^|_)(?:KEY|SECRET|TOKEN|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?)S?$|(?:APIKEY|PASSWORD|ACCESS_KEY_ID)$"
# `export NAME=value` in a set-up line, with the value written out (not taken from a variable or a command).
_ASSIGNMENT = r"(?:^|[\s;&])([A-Za-z_][A-Za-z0-9_]*)=(\"[^\"$`]+|'[^']+|[^\s\"'$`;&]+)"

# Prefixes, or whole names.
_OUTER_JOB = (
    *("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "PMI_", "PMI2_", "PMIX_"),
    *("STOKER_WARNED", "STOKER_SUBMISSION", "STOKER_NODE"),
)
_OUTER_JOB_STAYS = ("SLURM_CONF", "SLURM_SACK_KEY")

# Recorded in env.json: what explains a difference between two machines or two days. Prefixes end in _.
_RECORDED = """
    CC CONDA_DEFAULT_ENV CONDA_PREFIX CUBLAS_ CUDA_ CXX FI_ GLOO_ HF_HOME HF_HUB_OFFLINE HIP_ HOSTNAME LANG LC_ALL
    LD_LIBRARY_PATH LD_PRELOAD LOADEDMODULES MALLOC_ MKL_ MODULEPATH NCCL_ NVIDIA_ NVTE_ OMP_ PATH PYTHONPATH PYTORCH_
    ROCR_ SLURM_CONF STOKER_ TMPDIR TORCHINDUCTOR_ TORCH_ TRITON_ TZ UCX_ VIRTUAL_ENV WANDB_DIR WANDB_MODE
    WANDB_PROJECT
"""


def is_secret(name: str) -> bool:
    """Whether a variable of this name is taken to hold a key, token or password."""
    return re.search(_SECRET, name, re.IGNORECASE) is not None


def secrets_in(line: str) -> list[str]:
    """Names of secrets whose value is written out in a shell line: `export HF_TOKEN=abc`, not `HF_TOKEN=$(cat f)`."""
    return [m[1] for m in re.finditer(_ASSIGNMENT, line) if is_secret(m[1])]


def without_outer_job(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with the traces of an enclosing Slurm job removed; they would bend what sbatch asks for."""
    return {k: v for k, v in environment.items() if k in _OUTER_JOB_STAYS or not k.startswith(_OUTER_JOB)}


def recorded(environment: Mapping[str, str]) -> dict[str, str]:
    """What env.json keeps of it, sorted; an allow-list, and never anything that looks like a secret."""
    words = _RECORDED.split()
    names, prefixes = {w for w in words if w[-1] != "_"}, tuple(w for w in words if w[-1] == "_")
    kept = (n for n in sorted(environment) if n in names or n.startswith(prefixes))
    return {n: environment[n] for n in kept if not is_secret(n)}
