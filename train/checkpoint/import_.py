"""`stoker checkpoint import`: weights from elsewhere into a checkpoint that runs can begin with.

Owns: the command line and what it prints. Each format is another module's.
"""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from ...launcher.run.chosen import find_checkpoint
from ...launcher.run.files import read_json
from ...launcher.run.manifest import read_manifest
from ..state.agreement import summary
from .bar import Bar, dtype_of
from .reading import model_settings

EPILOG = """example:
  stoker checkpoint import --hf Llama-3.1-8B --out llama-3.1-8b
  stoker launch --config-dir llama-3.1-8b/config model=imported model.init_from=llama-3.1-8b ...
  stoker checkpoint import --dcp step-1000 --trust-pickle --strip model. --model settings.yaml --out from-dcp
docs/huggingface.md has more."""


def main(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.dcp is not None:
        return _dcp(arguments)
    for name in ("trust_pickle", "model", "strip", "map"):
        if getattr(arguments, name):
            raise ValueError(f"--{name.replace('_', '-')} is for --dcp")
    return _hugging_face(arguments)


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        "stoker checkpoint import",
        description="Make a weights-only checkpoint. Nothing pickled is read unless you say so.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = p.add_mutually_exclusive_group(required=True)
    source.add_argument("--hf", type=Path, metavar="DIR", help="a model's directory as transformers writes it")
    source.add_argument("--dcp", type=Path, metavar="DIR", help="a checkpoint of torch.distributed.checkpoint")
    p.add_argument("--out", type=Path, required=True, metavar="DIR", help="the new checkpoint")
    p.add_argument("--dtype", type=dtype_of, help="of the weights: fp32, bf16, ...; default: as in the files")
    dcp = p.add_argument_group("with --dcp")
    dcp.add_argument("--trust-pickle", action="store_true", help="read its .metadata, which is a pickle")
    dcp.add_argument(
        "--model", metavar="FILE|CHECKPOINT", help="settings of the model: YAML as in conf/model, or a checkpoint of "
        "ours that has them; default: what `export --dcp` left"
    )  # fmt: skip
    dcp.add_argument("--strip", default="", metavar="PREFIX", help="of its names, e.g. model.")
    dcp.add_argument("--map", type=Path, metavar="FILE", help="JSON: its names (without PREFIX) and ours for them")
    p.add_argument("--json", action="store_true", help="print what was made as JSON")
    return p


def _dcp(arguments: argparse.Namespace) -> int:
    if not arguments.trust_pickle:
        raise ValueError(
            f"{arguments.dcp / '.metadata'} is a pickle, which can run any program when it is read. If you trust who "
            "wrote it, give --trust-pickle: it is then read in a process of its own that knows no names but those of "
            "DCP's metadata"
        )
    from .dcp import Names, import_dcp

    names = Names(arguments.strip, None if arguments.map is None else _table(arguments.map))
    settings = None if arguments.model is None else _settings(arguments.model)
    with Bar("import") as bar:
        made = import_dcp(arguments.dcp, arguments.out, settings, names, arguments.dtype, bar.advance)
    if arguments.json:
        print(json.dumps({"out": str(arguments.out), **asdict(made)}))
        return 0
    print(f"{arguments.out}: {made.parameters:,} parameters")
    if made.unread:
        print(f"not taken over: {summary(made.unread)}")
    _tell_how_to_begin(arguments.out)
    return 0


def _tell_how_to_begin(out: Path) -> None:
    words = ("--config-dir", str(out / "config"), "model=imported", f"model.init_from={out}")
    print(f"to begin with it: {shlex.join(words)}")


def _table(path: Path) -> dict[str, str]:
    table = read_json(path)
    if not all(isinstance(v, str) for v in table.values()):
        raise ValueError(f"{path}: expected a JSON object, names to names")
    return table


def _settings(what: str) -> dict[str, Any]:
    path = Path(what)
    if path.is_file():
        try:
            found = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, RecursionError, ValueError) as e:
            raise ValueError(f"{what}: not YAML ({' '.join(str(e).split())})") from None
    else:
        found = model_settings(read_manifest(find_checkpoint(what)).state)
    if not isinstance(found, dict) or not found:
        raise ValueError(f"{what}: has no settings of a model")
    return found


def _hugging_face(arguments: argparse.Namespace) -> int:
    from ..hf.importing import SETTINGS, import_hf

    with Bar("import") as bar:
        made = import_hf(arguments.hf, arguments.out, arguments.dtype, bar.advance)
    if arguments.json:
        print(json.dumps({"out": str(arguments.out), "settings_file": str(arguments.out / SETTINGS), **asdict(made)}))
        return 0
    print(f"{arguments.out}: {made.family}, {made.parameters:,} parameters")
    for name, value in made.settings.items():
        print(f"  model.{name}: {value}")
    print(f"tokenizer: {', '.join(made.tokenizer) or 'none beside the weights'}")
    if made.unread:
        print(f"not read (unknown here): {', '.join(made.unread)}")
    _tell_how_to_begin(arguments.out)
    return 0
