"""`python -m stoker.train.checkpoint VERB ...`: tools on finished checkpoints that need torch. For `stoker checkpoint`.

Owns: dispatch and how errors look. A verb's module has `main(argv) -> exit code`, and raises ValueError for what the
user can put right.
"""

from __future__ import annotations

import importlib
import sys

from ...launcher.run.manifest import InvalidCheckpointError
from ...launcher.run.outcome import EXIT_FAILED, EXIT_FINISHED, EXIT_USAGE

# verb -> module of this folder
VERBS = {
    "verify": "verify",
    "diff": "diff",
    "average": "average",
    "import": "import_",
    "export": "export",
    "remove": "remove",
}


def main(argv: list[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    if debug:
        arguments.remove("--debug")
    if not arguments or arguments[0] not in VERBS:
        found = repr(arguments[0]) if arguments else "none"
        return _fail("", f"expected one of {', '.join(VERBS)}, found {found}", EXIT_USAGE)
    verb, *rest = arguments
    try:
        code: int = importlib.import_module(f".{VERBS[verb]}", __package__).main(rest)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stdout = None  # the reader (`| head`) has seen enough; no further flush
        return EXIT_FINISHED
    except (ValueError, InvalidCheckpointError, OSError) as e:
        if debug:
            raise
        usage = isinstance(e, ValueError) or verb == "diff"  # 1 of diff says: different
        return _fail(f" {verb}", str(e), EXIT_USAGE if usage else EXIT_FAILED)


def _fail(verb: str, text: str, code: int) -> int:
    for line in text.splitlines() or [""]:
        print(f"stoker checkpoint{verb}: error: {line}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
