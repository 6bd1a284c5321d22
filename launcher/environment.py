"""Environment variables: what is taken away before a submission, what is recorded.

Owns: two lists of names. Slurm hands the submitter's environment to the job, so secrets (conf/secret_names.py) travel
there and only there: never in a script, the run directory or an argument.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..conf.secret_names import is_secret

# Prefixes, or whole names.
_OUTER_JOB = (
    *("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "PMI_", "PMI2_", "PMIX_"),
    *("STOKER_WARNED", "STOKER_SUBMISSION", "STOKER_NODE", "STOKER_INSIDE"),
    *("STOKER_LOCAL_DIR", "STOKER_CODE", "STOKER_ENV_", "STOKER_STAGED"),
)
_OUTER_JOB_STAYS = ("SLURM_CONF", "SLURM_SACK_KEY")

# Recorded in env.json: what explains a difference between two machines or two days. Prefixes end in _.
_RECORDED = """
    CC CONDA_DEFAULT_ENV CONDA_PREFIX CUBLAS_ CUDA_ CXX FI_ GLOO_ HF_HOME HF_HUB_OFFLINE HIP_ HOSTNAME LANG LC_ALL
    LD_LIBRARY_PATH LD_PRELOAD LOADEDMODULES MALLOC_ MKL_ MODULEPATH NCCL_ NVIDIA_ NVTE_ OMP_ PATH PYTHONPATH PYTORCH_
    ROCR_ SLURM_CONF STOKER_ TMPDIR TORCHINDUCTOR_ TORCH_ TRITON_ TZ UCX_ VIRTUAL_ENV WANDB_DIR WANDB_MODE
    WANDB_PROJECT
"""


def without_outer_job(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with the traces of an enclosing Slurm job removed; they would bend what sbatch asks for."""
    return {k: v for k, v in environment.items() if k in _OUTER_JOB_STAYS or not k.startswith(_OUTER_JOB)}


def recorded(environment: Mapping[str, str]) -> dict[str, str]:
    """What env.json keeps of it, sorted; an allow-list, and never anything that looks like a secret."""
    words = _RECORDED.split()
    names, prefixes = {w for w in words if w[-1] != "_"}, tuple(w for w in words if w[-1] == "_")
    kept = (n for n in sorted(environment) if n in names or n.startswith(prefixes))
    return {n: environment[n] for n in kept if not is_secret(n)}
