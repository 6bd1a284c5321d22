"""Caches of compilers lie on the node, keyed by the code, unless the user put them elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path

from stoker.launcher.caches import cache_variables, is_compiled

CODE = "/tmp/stoker-1000/0123abcd"


def test_caches_lie_below_the_unpacked_code() -> None:
    assert cache_variables({"STOKER_CODE": CODE}, False) == {
        "TORCHINDUCTOR_CACHE_DIR": f"{CODE}/cache/inductor",
        "TRITON_CACHE_DIR": f"{CODE}/cache/triton",
        "CUDA_CACHE_PATH": f"{CODE}/cache/cuda",
        "STOKER_KERNELS_CACHE": f"{CODE}/cache/kernels",
        "PYTHONPYCACHEPREFIX": f"{CODE}/cache/python",
    }


def test_what_the_user_set_stays() -> None:
    mine = {"STOKER_CODE": CODE, "TRITON_CACHE_DIR": "/mine", "PYTHONPYCACHEPREFIX": ""}
    assert sorted(cache_variables(mine, False)) == [
        "CUDA_CACHE_PATH",
        "STOKER_KERNELS_CACHE",
        "TORCHINDUCTOR_CACHE_DIR",
    ]


def test_compiled_modules_stay_beside_their_sources_where_these_are_on_the_node() -> None:
    for name in ("STOKER_ENV_DIR", "STOKER_INSIDE"):
        assert "PYTHONPYCACHEPREFIX" not in cache_variables({"STOKER_CODE": CODE, name: "x"}, False)


def test_where_no_compiled_modules_may_be_written_those_that_there_are_are_used() -> None:
    assert "PYTHONPYCACHEPREFIX" not in cache_variables({"STOKER_CODE": CODE, "PYTHONDONTWRITEBYTECODE": "1"}, False)
    assert "PYTHONPYCACHEPREFIX" in cache_variables({"STOKER_CODE": CODE, "PYTHONDONTWRITEBYTECODE": ""}, False)


def test_without_node_local_storage_nothing_is_set() -> None:
    assert cache_variables({"HOME": "/home/me"}, False) == {}


def test_modules_that_are_compiled_already_are_used() -> None:
    assert "PYTHONPYCACHEPREFIX" not in cache_variables({"STOKER_CODE": CODE}, True)


def test_the_first_place_on_the_path_tells_whether_a_package_is_compiled(tmp_path: Path) -> None:
    for place in ("a", "b"):
        (tmp_path / place / "torch" / "__pycache__").mkdir(parents=True)
        (tmp_path / place / "torch" / "__init__.py").touch()
    path = [str(tmp_path / place) for place in ("none", "a", "b")]
    (tmp_path / f"b/torch/__pycache__/__init__.{sys.implementation.cache_tag}.pyc").touch()
    assert not is_compiled("torch", path)
    (tmp_path / f"a/torch/__pycache__/__init__.{sys.implementation.cache_tag}.pyc").touch()
    assert is_compiled("torch", path)
    assert not is_compiled("numpy", path)
