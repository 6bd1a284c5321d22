"""Bind mounts and images of containers, as they are written in a configuration.

Owns: reading HOST[:INSIDE[:ro]], which paths each runtime's command line can carry, and which images are files here.
Standard library only: the supervisor reads mounts too.
"""

from __future__ import annotations

from dataclasses import dataclass

# What separates parts of a mount on the runtime's command line and cannot be escaped there. pyxis: args.c splits at
# comma and colon and writes the parts into a table that is separated by blanks; apptainer: "Bind Paths and Mounts".
SEPARATORS = {"pyxis": ":, \t", "apptainer": ":,\\"}


@dataclass(frozen=True)
class Mount:
    source: str  # absolute, on the host
    target: str  # absolute, inside
    read_only: bool = False


def parse_mount(text: str) -> Mount:
    """`/data`, `/data:/inside` or `/data:/inside:ro`.

    Raises:
        ValueError: it is none of these; says what was expected.
    """
    source, *rest = text.split(":")
    target = rest[0] if rest else source
    flags = rest[1:]
    if len(flags) > 1 or flags not in ([], ["ro"], ["rw"]) or not (source.startswith("/") and target.startswith("/")):
        raise ValueError("expected HOST, HOST:INSIDE or HOST:INSIDE:ro with absolute paths")
    return Mount(source, target, flags == ["ro"])


def separators_in(runtime: str, path: str) -> str:
    """Characters of a path that the runtime would take for the end of it; empty if it can be mounted."""
    return "".join(sorted(set(path) & set(SEPARATORS.get(runtime, ""))))


def is_file_image(runtime: str, image: str | None) -> bool:
    """Whether an image is a file or directory, not an address."""
    if not image:
        return False
    if runtime == "apptainer":
        return "://" not in image
    # pyxis takes everything for a name in a registry that does not begin with a slash or a dot.
    return runtime == "pyxis" and (image.startswith(("/", "./", "../", "~")) or image.endswith(".sqsh"))
