"""`stoker kernels build|list|show [KEY=VALUE ...]`: hands over to `python -m stoker.kernels`, in the container if any.

Owns: the verb's configuration, and the way into the container. Compiling is stoker.kernels', which the launcher never
imports. In a container there is a copy of its sources in the kernels' cache, and nothing else of ours is mounted.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from .code import package_root
from .container import entry, environment_inside
from .errors import environment_error
from .site_cache import directory

_CACHE = "STOKER_KERNELS_CACHE"  # as kernels/native/cache.py reads it
_MODULE = "stoker.kernels"
_READ = ("kernels.", "container.")  # what of a configuration is looked at here


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("stoker kernels", add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", type=Path)
    arguments, rest = parser.parse_known_args(argv)
    overrides = [word for word in rest if "=" in word and not word.startswith("-")]
    words = [word for word in rest if word not in overrides]
    if not overrides and arguments.config_dir is None:
        _become([sys.executable, "-m", _MODULE, *words])
    from ..conf.checks import check, errors
    from ..conf.compose import compose
    from ..conf.problems import ConfigError

    composed = compose(overrides, arguments.config_dir)
    wrong = [p for p in errors(check(composed.config, files=False)) if p.field.startswith(_READ)]
    if wrong:
        raise ConfigError(wrong)
    plain = composed.plain
    wanted = plain["kernels"]["architectures"]
    if words[:1] == ["build"] and wanted and not any(word.startswith("--arch") for word in words):
        words.append(f"--arch={','.join(map(str, wanted))}")
    if plain["container"]["runtime"] == "none":
        _become([sys.executable, "-m", _MODULE, *words])
    return _inside(plain, words)


def _become(command: Sequence[str]) -> NoReturn:
    sys.stdout.flush()
    os.execvp(command[0], list(command))


def _inside(plain: Mapping[str, Any], words: Sequence[str]) -> int:
    """In the container, whose compiler, host libraries and torch the object is then built with."""
    cache = Path(os.environ.get(_CACHE) or directory(os.environ) / "kernels")
    cache.mkdir(parents=True, exist_ok=True)
    copy = Path(tempfile.mkdtemp(prefix=".tmp-", dir=cache))
    try:
        copy_sources(copy / "stoker")
        command, env = line(plain, cache, copy, words, os.environ)
        sys.stdout.flush()
        return subprocess.run(command, env=env, check=False).returncode
    except FileNotFoundError as e:
        raise environment_error(f"{e.filename}: not found; do this where the container's runtime is") from e
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def copy_sources(target: Path) -> None:
    """The package with nothing in it but the kernels."""
    package = package_root()
    ignored = shutil.ignore_patterns("__pycache__", "built")
    shutil.copytree(package / "kernels", target / "kernels", ignore=ignored)
    shutil.copy(package / "__init__.py", target)


def line(
    plain: Mapping[str, Any], cache: Path, copy: Path, words: Sequence[str], environ: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """(command, environment). Of the run's mounts only the cache is there, at its own path."""
    data = plain["data"] | {"sources": [], "tokenizer": None}
    here = {
        **plain,
        "data": data,
        "model": plain["model"] | {"init_from": None},
        "checkpoint": plain["checkpoint"] | {"storage": None, "local": None},
    }
    apptainer = next((p for p in ("apptainer", "singularity") if shutil.which(p)), "apptainer")
    inside = entry(here, str(cache), sys.executable, str(cache), apptainer)
    srun = []
    if plain["container"]["runtime"] == "pyxis":
        cluster = plain["cluster"]
        asked = [f"--{name}={cluster[name]}" for name in ("partition", "account", "qos") if cluster[name]]
        srun = ["srun", "--nodes=1", "--ntasks=1", *asked, *inside.options]
    env = environment_inside(environ, plain["cluster"]["env"], (sys.prefix,))
    env |= plain["cluster"]["env"] | {"PYTHONPATH": str(copy), _CACHE: str(cache)}
    return [*srun, *inside.words, inside.python, "-m", _MODULE, *words], env
