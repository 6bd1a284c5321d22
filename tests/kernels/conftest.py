"""One thread and a fixed seed for every test of the kernels."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _deterministic() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
