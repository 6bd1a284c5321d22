"""`stoker VERB ...`: a table of verbs, each imported only when it is called.

Owns: dispatch, help, and how errors look. A verb's module has `main(argv) -> exit code`; it raises UserError (or
ValueError) for what the user can put right. Nothing third-party may be imported from here, and nothing at all that
help has no use for.
"""

from __future__ import annotations

import importlib
import sys

from .. import __version__

# As in run/outcome.py, whose import would cost `stoker --help` a third of its time.
EXIT_FINISHED, EXIT_FAILED, EXIT_USAGE = 0, 1, 2

# verb -> (module below stoker.launcher, what it does)
VERBS = {
    "launch": ("launch", "freeze a run and submit it to Slurm, or start it in the background (cluster=local)"),
    "run": ("foreground", "freeze a run and work on it here: a workstation, or inside salloc"),
    "status": ("status", "show runs: state, step, loss, speed, last checkpoint"),
    "logs": ("logs", "show or follow a run's log over all its attempts"),
    "cancel": ("cancel", "stop a run for good; nothing of it starts again"),
    "watch": ("watch_runs", "say which runs have a problem, and mend what can be mended; for cron"),
    "shell": ("shell", "a shell on a node of a running run, as its workers see it"),
    "stacks": ("stacks", "show where every rank of a running run stands: Python and kernel"),
    "resume": ("resume", "submit an ended run once more"),
    "track": ("track", "send a run's metrics to Weights & Biases, live or later"),
    "plot": ("plot", "draw a run's loss, with what interrupted it (needs matplotlib)"),
    "data": ("data", "prepare data: `stoker data tokenize`"),
    "report": ("report", "a run as Markdown, or all for a bug report in one archive"),
    "site": ("site_verb", "show what the Slurm here is, and write a cluster profile"),
    "cluster": ("rehearsal.cli", "a private Slurm cluster on this machine, to try things and break them"),
    "rehearse": ("rehearsal.rehearse", "break a small run in every way and report what it cost"),
    "demo": ("rehearsal.demo", "train on a private cluster, kill a node, watch the run finish"),
}


def usage() -> str:
    width = max(map(len, VERBS)) + 2
    return "\n".join(
        [
            "usage: stoker VERB [arguments]     (`stoker VERB --help` says more)",
            "",
            *(f"  {verb:<{width}}{text}" for verb, (_, text) in VERBS.items()),
            "",
            "  --version    print the version",
            "  --debug      show the traceback of an error",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Entry point of the `stoker` command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    if debug:
        arguments.remove("--debug")
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return EXIT_FINISHED if arguments else EXIT_USAGE
    if arguments[0] == "--version":
        print(f"stoker {__version__}")
        return EXIT_FINISHED
    verb, *rest = arguments
    if verb not in VERBS:
        return _fail("stoker", _unknown(verb), EXIT_USAGE)
    return _call(verb, rest, debug)


def _call(verb: str, arguments: list[str], debug: bool) -> int:
    command = f"stoker {verb}"
    try:
        module = importlib.import_module(f".{VERBS[verb][0]}", __package__)
        code: int = module.main(arguments)
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (`| head`) has seen enough. Python would complain once more when it flushes at exit.
        sys.stdout = None
        return EXIT_FINISHED
    except Exception as e:
        if debug:
            raise
        return _explain(command, e)


def _explain(command: str, e: Exception) -> int:
    from .errors import UserError

    if isinstance(e, UserError):
        return _fail(command, str(e), e.exit_code)
    if isinstance(e, ValueError):
        return _fail(command, str(e), EXIT_USAGE)
    if isinstance(e, OSError):
        return _fail(command, str(e), EXIT_FAILED)
    text = f"internal error: {type(e).__name__}: {e}\nthis is a defect in stoker; `--debug` shows the traceback"
    return _fail(command, text, EXIT_FAILED)


def _fail(command: str, text: str, exit_code: int) -> int:
    for line in text.splitlines() or [""]:
        print(f"{command}: error: {line}", file=sys.stderr)
    return exit_code


def _unknown(verb: str) -> str:
    import difflib  # only needed when something is wrong

    near = difflib.get_close_matches(verb, VERBS, n=1)
    hint = f"did you mean `{near[0]}`?" if near else f"expected one of {', '.join(VERBS)}"
    return f"unknown verb {verb!r}; {hint}"


if __name__ == "__main__":
    sys.exit(main())
