"""What every test gets: one thread per process, no network, no outer Slurm, fixed seeds; skips by marker."""

from __future__ import annotations

import os
import random
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

REPOSITORY = Path(__file__).resolve().parent.parent

# Before any test module imports torch or numpy: thread pools are sized at import.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
# A suite started inside an allocation must not act on that allocation, nor inherit its settings.
for _name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_", "SRUN_", "SQUEUE_", "SACCT_"))]:
    del os.environ[_name]
# The daemons lie in sbin, which an ordinary user's PATH may lack.
os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"])

# The same examples on every machine and every run; time limits would only measure what else the machine does.
settings.register_profile(
    "stoker", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("stoker")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, and put the Slurm tests, the longest, first."""
    slurm_is_missing = not all(shutil.which(program) for program in ("slurmctld", "slurmd", "sbatch", "munged"))
    for item in items:
        # In CI a skipped Slurm test would be a hole that nobody sees: there it fails.
        if slurm_is_missing and item.get_closest_marker("slurm") and os.environ.get("CI") != "true":
            item.add_marker(pytest.mark.skip(reason="Slurm is not installed (see tools/slurm_packages.sh)"))
        if item.get_closest_marker("gpu") and not _has_cuda():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    items.sort(key=lambda item: item.get_closest_marker("slurm") is None)


def _has_cuda() -> bool:
    # The device files are looked at first: importing torch only to learn that there is no GPU costs seconds.
    if not Path("/dev/nvidiactl").exists():
        return False
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What stoker keeps about a site is kept for this session only."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Fix the global generators of the libraries that are loaded, so that no test depends on the one before it."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root folder of the clone."""
    return REPOSITORY
