"""From group choices and overrides to one typed configuration: YAML files -> Hydra -> schema.

Owns: the call of Hydra, and turning its errors into ours, one line per problem. Rules between fields are checks.py's.
Relative paths in a configuration are those of the current directory; they are made absolute here, because the job that
reads them runs elsewhere.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
import yaml  # type: ignore[import-untyped]
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import (
    GrammarParseError,
    InterpolationKeyError,
    InterpolationResolutionError,
    OmegaConfBaseException,
)

from .load import from_plain, to_plain
from .mounts import is_file_image
from .overrides import prepare
from .problems import ConfigError, Problem, no_such_choice
from .schema import Config
from .yaml_files import Choices, check_file, choices, clashes, package_of, unreadable

DIRECTORY = Path(__file__).resolve().parent  # of our own YAML files
PRIMARY = "config"
SCHEMA = "stoker_schema"  # as config.yaml's defaults list names it


@dataclass(frozen=True)
class Composed:
    """A composed configuration in the three forms that a run keeps."""

    config: Config
    yaml: str  # for people: config.yaml
    plain: dict[str, Any]  # for programs: config.json, read by load.load
    overrides: tuple[str, ...]  # as they were given


def compose(overrides: Sequence[str], config_dir: Path | None = None) -> Composed:
    """Compose the configuration that `key=value` and `group=choice` overrides ask for.

    config_dir: a directory of further YAML files (`experiment/mine.yaml`, `cluster/mine.yaml`, own groups).
    Raises:
        ConfigError: whatever is wrong with overrides and files, all of it where that can be told at once.
    """
    own = None if config_dir is None else _own(config_dir)
    known = choices([DIRECTORY, *([own] if own else [])])
    ready, problems = prepare(overrides, known, default_groups())
    with _initialized(own) as search_path:
        try:
            problems += _problems_in_files(ready, search_path, own, known) if own else []
            if problems:
                raise ConfigError(problems)
            composed = hydra.compose(PRIMARY, overrides=ready + search_path)
        except ConfigError:
            raise
        except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as e:
            raise ConfigError([*problems, _translated(e, known)]) from e
    plain = to_plain(from_plain(_resolved(composed)))
    # OmegaConf makes such words of the booleans that people switch options with.
    options = plain["cluster"]["sbatch"]
    plain["cluster"]["sbatch"] = {k: v.lower() if v in ("True", "False") else v for k, v in options.items()}
    _make_absolute(plain, Path.cwd())
    return Composed(from_plain(plain), _to_yaml(plain), plain, tuple(overrides))


def default_groups() -> list[str]:
    """The groups of config.yaml's defaults list, in its order."""
    entries = yaml.safe_load((DIRECTORY / f"{PRIMARY}.yaml").read_text(encoding="utf-8"))["defaults"]
    return [group for entry in entries if isinstance(entry, dict) for group in entry]


def _own(directory: Path) -> Path:
    own = directory.expanduser().resolve()
    if not own.is_dir():
        raise ConfigError([Problem("--config-dir", str(directory), "no such directory")])
    problems = clashes(own, DIRECTORY)
    if problems:
        raise ConfigError(problems)
    return own


@contextmanager
def _initialized(own: Path | None) -> Iterator[list[str]]:
    """Hydra set up for our directory; the overrides that add a user's. What an embedding program had set up returns."""
    if f"{SCHEMA}.yaml" not in ConfigStore.instance().repo:
        ConfigStore.instance().store(name=SCHEMA, node=Config)
    search_path = []
    if own is not None:
        search_path = [f"hydra.searchpath=[{QuotedString(f'file://{own}', Quote.single).with_quotes()}]"]
    embedding = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with warnings.catch_warnings(), hydra.initialize_config_dir(str(DIRECTORY), version_base="1.3"):
            warnings.simplefilter("ignore")  # Hydra's hints to the authors of configurations
            yield search_path
    finally:
        GlobalHydra.instance().hydra = embedding


def _problems_in_files(overrides: list[str], search_path: list[str], own: Path, known: Choices) -> list[Problem]:
    """Problems in those of the user's files that these overrides choose; ours are held against the schema by a test.

    First the files that are chosen directly, without Hydra, which would stop at the first problem; where they are
    right, those that their defaults lists choose.
    """
    checked: dict[Path, list[Problem]] = {}
    for group, _, chosen in (text.lstrip("+").partition("=") for text in overrides):
        file = own / group / f"{chosen}.yaml"
        if chosen in known.get(group, ()) and file.is_file():
            checked[file] = check_file(file, package_of(file, group), known)
    if not any(checked.values()):
        loader = GlobalHydra.instance().config_loader()
        for entry in loader.compute_defaults_list(PRIMARY, overrides + search_path, RunMode.RUN).defaults:
            file = own / f"{entry.config_path}.yaml"
            if file not in checked and file.is_file():
                checked[file] = check_file(file, entry.package or "", known)
    return [problem for problems in checked.values() for problem in problems]


def _resolved(composed: DictConfig) -> Any:
    """Plain values, interpolations resolved; what cannot be resolved or is yet to be given is told all at once."""
    problems = list(_unresolved(composed))
    if problems:
        raise ConfigError(problems)
    return OmegaConf.to_container(composed, resolve=True, enum_to_str=True)


def _unresolved(node: Any) -> Iterator[Problem]:
    keys = range(len(node)) if isinstance(node, ListConfig) else list(node) if isinstance(node, DictConfig) else ()
    for key in keys:
        if OmegaConf.is_missing(node, key):
            field = _dotted(node._get_full_key(key))
            yield Problem(field, None, f"must be given; add {field}=...")
            continue
        try:
            yield from _unresolved(node[key])
        except OmegaConfBaseException as e:
            yield _translated_value(e)


def _make_absolute(plain: dict[str, Any], base: Path) -> None:
    """Paths of files on this machine or on shared storage, in place; an empty one is left for checks.py to find."""
    data = plain["data"]
    for holder, key in [(plain, "run_root"), (data, "tokenizer"), *((source, "prefix") for source in data["sources"])]:
        if holder[key]:
            holder[key] = str(base / Path(holder[key]).expanduser())
    chosen = plain["model"]["init_from"] or ""
    prefix, path = ("hf:", chosen[3:]) if chosen.startswith("hf:") else ("", chosen)
    if path.strip():
        plain["model"]["init_from"] = f"{prefix}{base / Path(path).expanduser()}"
    container = plain["container"]
    if is_file_image(container["runtime"], container["image"]):
        container["image"] = str(base / Path(container["image"]).expanduser())


def _translated(e: Exception, known: Choices) -> Problem:
    """What Hydra says, in one line, with the file where it says one."""
    if isinstance(e, yaml.YAMLError):
        mark = getattr(e, "problem_mark", None)
        return unreadable(e, mark.name if mark is not None else "configuration")
    text = " ".join(str(e).split())
    place = re.match(r"In '?([^':]+)'?: ", text)
    where = f"{place[1]}.yaml" if place and place[1] != PRIMARY else None
    text = text[place.end() :] if place else text
    if isinstance(e, MissingConfigException) and e.missing_cfg_file:
        return _missing_file(e.missing_cfg_file, known, where)
    gone = re.match(r"Could not delete from config. '([^']+)' does not exist", text)
    if gone:
        return Problem(gone[1], None, "is not there to be removed")
    cause = e if isinstance(e, OmegaConfBaseException) else e.__cause__ or e.__context__
    if isinstance(cause, OmegaConfBaseException):
        problem = _translated_value(cause)
        override = re.match(r"Error merging override \+*([^=]+)=", text)
        return Problem(override[1] if override else problem.field, None, problem.message, where=where)
    return Problem("configuration", None, text, where=where)


def _missing_file(name: str, known: Choices, where: str | None) -> Problem:
    group, _, chosen = name.partition("/")
    inner, _, rest = chosen.partition("/")
    if inner in known and rest:  # `- model: tiny` in a file of the group experiment looks below experiment/
        return Problem(f"{inner}: {rest}", None, f"in a defaults list write `override /{inner}: {rest}`", where=where)
    return no_such_choice(group, chosen, known.get(group, ()), where)


def _translated_value(e: OmegaConfBaseException) -> Problem:
    field = _dotted(e.full_key or "") or "configuration"
    first = str(e).partition("\n")[0]
    if re.fullmatch(r"data\.sources\.\d+", field):
        return Problem(field, None, "no such entry; give the whole list: data.sources='[{prefix: A}, {prefix: B}]'")
    if isinstance(e, GrammarParseError):
        return Problem(field, None, f"{first}; close what ${{ begins, or write \\${{ for the characters themselves")
    if isinstance(e, InterpolationKeyError):
        return Problem(field, None, f"{first}; for a variable of the shell write $NAME, or \\${{NAME}}")
    if isinstance(e, InterpolationResolutionError):
        reason = first.rpartition("raised while resolving interpolation: ")[2].strip('"')
        return Problem(field, None, f"cannot be resolved: {reason}")
    return Problem(field, None, first)


def _dotted(key: str) -> str:
    return re.sub(r"\[(\d+)\]", r".\1", key)


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Quotes strings that OmegaConf would read as numbers and YAML itself would not (1e-4)."""


def _text(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    try:
        float(value)
    except ValueError:
        return dumper.represent_str(value)
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="'")


_Dumper.add_representer(str, _text)


def _to_yaml(plain: dict[str, Any]) -> str:
    dumped = yaml.dump(plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    assert isinstance(dumped, str)
    return dumped
