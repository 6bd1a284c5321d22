"""`stoker checkpoint export`: a checkpoint's weights for other programs.

Owns: the command line and what it prints. Each format is another module's.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from ...launcher.run.chosen import NOTATION, find_checkpoint
from .bar import Bar, bytes_of, dtype_of

EPILOG = """example:
  stoker checkpoint export --hf exported runs/llama-261130-104733-x7q2 --dtype bf16
  stoker checkpoint export --dcp exported runs/llama-261130-104733-x7q2
docs/huggingface.md has more."""


def main(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.dcp is None:
        return _hugging_face(arguments)
    for name in ("max_shard_size", "tokenizer", "like"):
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} is for --hf")
    return _dcp(arguments)


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        "stoker checkpoint export",
        description="Write a checkpoint's weights in another format, from the float32 masters where it has them.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("checkpoint", metavar="CHECKPOINT", help=NOTATION)
    target = p.add_mutually_exclusive_group(required=True)
    target.add_argument("--hf", type=Path, metavar="DIR", help="the new directory, for transformers")
    target.add_argument("--dcp", type=Path, metavar="DIR", help="the new directory, for torch.distributed.checkpoint")
    p.add_argument("--dtype", type=dtype_of, help="of the weights: fp32, bf16, ...; default: as the model was trained")
    p.add_argument("--max-shard-size", type=bytes_of, metavar="SIZE", help="of a file, e.g. 500MB (default: 5GB)")
    p.add_argument("--tokenizer", type=Path, metavar="PATH", help="tokenizer.json, or a directory; default: the run's")
    p.add_argument(
        "--like", type=Path, metavar="DIR", help="model directory to take token ids and the like from; default: the "
        "one that the run began with"
    )  # fmt: skip
    p.add_argument("--json", action="store_true", help="print what was made as JSON")
    return p


def _dcp(arguments: argparse.Namespace) -> int:
    from .dcp import export_dcp

    checkpoint = find_checkpoint(arguments.checkpoint)
    with Bar("export") as bar:
        parameters = export_dcp(checkpoint, arguments.dcp, arguments.dtype, bar.advance)
    if arguments.json:
        print(json.dumps({"out": str(arguments.dcp), "checkpoint": str(checkpoint), "parameters": parameters}))
        return 0
    print(f"{arguments.dcp}: {parameters:,} parameters of {checkpoint}")
    return 0


def _hugging_face(arguments: argparse.Namespace) -> int:
    from ..hf.exporting import Options, export_hf

    checkpoint = find_checkpoint(arguments.checkpoint)
    limit = arguments.max_shard_size or Options.limit
    options = Options(arguments.dtype, limit, arguments.tokenizer, arguments.like)
    with Bar("export") as bar:
        made = export_hf(checkpoint, arguments.hf, options, bar.advance)
    if arguments.json:
        print(json.dumps({"out": str(arguments.hf), "checkpoint": str(checkpoint), **asdict(made)}))
        return 0
    values = "the float32 masters" if made.from_masters else "the weights"
    print(
        f"{arguments.hf}: {made.family}, {made.parameters:,} parameters in {made.dtype}, from {values} of {checkpoint}"
    )
    print(f"tokenizer: {made.tokenizer or 'none found; name one with --tokenizer'}")
    return 0
