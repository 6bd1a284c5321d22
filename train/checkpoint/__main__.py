"""`python -m stoker.train.checkpoint VERB ...`: tools on finished checkpoints that need torch. For `stoker checkpoint`.

Owns: dispatch and how errors look. A verb's module has `main(argv) -> exit code`, and raises ValueError for what the
user can put right.
"""

from __future__ import annotations

import importlib
import signal
import sys

from ...launcher.run.manifest import InvalidCheckpointError
from ...launcher.run.outcome import EXIT_FAILED, EXIT_FINISHED, EXIT_USAGE
from ...launcher.run.streams import let_go, open_missing

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
    """Returns the exit code."""
    try:
        return _main(list(sys.argv[1:] if argv is None else argv))
    finally:
        let_go()


def _main(arguments: list[str]) -> int:
    open_missing()
    debug = "--debug" in arguments
    if debug:
        arguments.remove("--debug")
    if not arguments or arguments[0] not in VERBS:
        found = repr(arguments[0]) if arguments else "none"
        return _fail("", f"expected one of {', '.join(VERBS)}, found {found}", EXIT_USAGE)
    verb, *rest = arguments
    code: int = EXIT_USAGE if verb == "diff" else EXIT_FINISHED  # of diff 0 says: the same
    try:
        code = importlib.import_module(f".{VERBS[verb]}", __package__).main(rest)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return code  # the reader (`| head`) has seen enough
    except Exception as e:
        if debug:
            raise
        return _explain(verb, e)


def _explain(verb: str, e: Exception) -> int:
    failed = EXIT_USAGE if verb == "diff" else EXIT_FAILED  # 1 of diff says: different
    if isinstance(e, ValueError):
        return _fail(f" {verb}", str(e), EXIT_USAGE)
    if isinstance(e, (InvalidCheckpointError, OSError)):
        return _fail(f" {verb}", str(e), failed)
    if isinstance(e, MemoryError):
        return _fail(f" {verb}", "out of memory", failed)
    text = f"internal error: {type(e).__name__}: {e}\nthis is a defect in stoker; `--debug` shows the traceback"
    return _fail(f" {verb}", text, failed)


def _fail(verb: str, text: str, code: int) -> int:
    for line in text.splitlines() or [""]:
        # Names in other people's files do not speak to the terminal.
        plain = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
        print(f"stoker checkpoint{verb}: error: {plain}", file=sys.stderr)
    return code


def _stop(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    for ending in (signal.SIGTERM, signal.SIGHUP):  # as an error ends it: what is half made is taken away
        if signal.getsignal(ending) is not signal.SIG_IGN:  # nohup's
            signal.signal(ending, _stop)
    sys.exit(main())
