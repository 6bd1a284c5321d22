"""`stoker checkpoint import`: weights from elsewhere into a checkpoint that runs can begin with.

Owns: the command line and what it prints. Each format is another module's.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from .bar import Bar, dtype_of

EPILOG = """example:
  stoker checkpoint import --hf Llama-3.1-8B --out llama-3.1-8b
  stoker launch --config-dir llama-3.1-8b/config model=imported model.init_from=llama-3.1-8b ...
docs/huggingface.md has more."""


def main(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    return _hugging_face(arguments)


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        "stoker checkpoint import",
        description="Make a weights-only checkpoint. Nothing pickled is read.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = p.add_mutually_exclusive_group(required=True)
    source.add_argument("--hf", type=Path, metavar="DIR", help="a model's directory as transformers writes it")
    p.add_argument("--out", type=Path, required=True, metavar="DIR", help="the new checkpoint")
    p.add_argument("--dtype", type=dtype_of, help="of the weights: fp32, bf16, ...; default: as in the files")
    p.add_argument("--json", action="store_true", help="print what was made as JSON")
    return p


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
    settings = (arguments.out / SETTINGS).parent.parent
    print(f"to begin with it: --config-dir {settings} model=imported model.init_from={arguments.out}")
    return 0
