"""`stoker VERB ...`: a table of verbs, each imported only when it is called.

Owns: dispatch, help, and how errors look. A verb's module has `main(argv) -> exit code`; it raises UserError (or
ValueError) for what the user can put right. Nothing third-party may be imported from here, and nothing at all that
help has no use for.
"""

from __future__ import annotations

import contextlib
import importlib
import sys

from .. import __version__
from .run.streams import let_go, open_missing

# As in run/outcome.py, whose import would cost `stoker --help` a third of its time.
EXIT_FINISHED, EXIT_FAILED, EXIT_USAGE = 0, 1, 2

# verb -> (module below stoker.launcher, what it does)
VERBS = {
    "launch": ("launch", "freeze a run and submit it to Slurm, or start it in the background (cluster=local)"),
    "plan": ("plan", "memory, communication and time of a layout, without any GPU"),
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
    "checkpoint": ("checkpoint", "list, show, verify, compare, prune, average, import and export checkpoints"),
    "bench": ("bench", "time the kernels' implementations on this machine"),
    "kernels": ("kernels", "build the native CUDA kernels, and show which there are"),
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
    try:
        return _main(argv)
    finally:
        let_go()


def _main(argv: list[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    open_missing()
    debug = "--debug" in arguments
    if debug:
        arguments.remove("--debug")
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        return _finish("stoker", EXIT_FINISHED if arguments else EXIT_USAGE, usage())
    if arguments[0] == "--version":
        return _finish("stoker", EXIT_FINISHED, f"stoker {__version__}")
    verb, *rest = arguments
    if verb not in VERBS:
        return _fail("stoker", _unknown(verb), EXIT_USAGE)
    return _call(verb, rest, debug)


def _call(verb: str, arguments: list[str], debug: bool) -> int:
    command = f"stoker {verb}"
    try:
        module = importlib.import_module(f".{VERBS[verb][0]}", __package__)
        code: int = module.main(arguments)
        return _finish(command, code)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return _finish(command, EXIT_FINISHED)
    except SystemExit as e:  # argparse's, after its help or an error
        code = e.code if isinstance(e.code, int) else EXIT_FAILED
        if _finish(command, code) != code:
            return EXIT_FAILED
        raise
    except Exception as e:
        if debug:
            raise
        code = _explain(command, e)
        if isinstance(e, OSError):
            with contextlib.suppress(OSError):
                sys.stdout.flush()
                return code
            sys.stdout = None  # it is what could not be written
        return code


def _finish(command: str, code: int, text: str = "") -> int:
    """The exit code, once what was printed is written; Python would tell at its exit, and strangely, that it is not."""
    try:
        print(text, end="\n" if text else "", flush=True)
    except BrokenPipeError:
        sys.stdout = None  # the reader (`| head`) has seen enough; no further flush
    except OSError as e:
        sys.stdout = None
        return _fail(command, f"standard output: {e}", EXIT_FAILED)
    return code


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
