"""Random corruptions of a checkpoint, from a seed: what disks, copies, tools and people do to files.

Owns: the kinds, and which files a corruption has touched. All kinds leave something that no reader may take for the
whole it was, or what it was. What no checksum can see is not among them: a forgery of files, their checksums and the
manifest with its own checksum, all consistent.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.launcher.run.manifest import BLOCK, INDEX, MANIFEST


@dataclass(frozen=True)
class Scene:
    """The directory to be damaged, and what else lies about."""

    target: Path
    step: Path  # another step of the same run: same names, same sizes
    run: Path  # the same step of another run of the same model, saved by as many ranks
    model: Path  # the same step of a run of another model
    random: random.Random

    def any(self) -> str:
        return self.random.choice(sorted(p.name for p in self.target.iterdir()))

    def shard(self) -> str:
        return self.random.choice(sorted(p.name for p in self.target.glob("*.safetensors")))

    def other(self) -> Path:
        return self.random.choice((self.step, self.run, self.model))

    def read(self, name: str) -> bytearray:
        return bytearray((self.target / name).read_bytes())

    def write(self, name: str, data: bytes | bytearray) -> set[str]:
        """Never in place: the file may be a link to one that other cases need."""
        (self.target / name).unlink(missing_ok=True)
        (self.target / name).write_bytes(data)
        return {name}

    def take(self, other: Path, *names: str) -> set[str]:
        for name in names:
            self.write(name, (other / name).read_bytes())
        return set(names)


Kind = Callable[[Scene], set[str]]  # what was touched
KINDS: dict[str, Kind] = {}


def kind(act: Kind) -> Kind:
    KINDS[act.__name__.replace("_", " ")] = act
    return act


def corrupt(scene: Scene, name: str) -> set[str]:
    return KINDS[name](scene)


def _range(scene: Scene, size: int) -> tuple[int, int]:
    """Some bytes of a file, mostly few."""
    length = min(size, scene.random.choice((1, 8, 512, 4096, 65_536, size)))
    at = scene.random.randrange(size - length + 1)
    return at, at + length


@kind
def one_bit_flipped(scene: Scene) -> set[str]:
    data = scene.read(name := scene.any())
    data[scene.random.randrange(len(data))] ^= 1 << scene.random.randrange(8)
    return scene.write(name, data)


@kind
def one_bit_of_a_shard_flipped(scene: Scene) -> set[str]:
    data = scene.read(name := scene.shard())
    data[scene.random.randrange(len(data))] ^= 1 << scene.random.randrange(8)
    return scene.write(name, data)


@kind
def a_range_zeroed(scene: Scene) -> set[str]:
    data = scene.read(name := scene.any())
    begin, end = _range(scene, len(data))
    data[begin:end] = bytes(end - begin)
    return scene.write(name, data)


@kind
def a_range_of_noise(scene: Scene) -> set[str]:
    data = scene.read(name := scene.any())
    begin, end = _range(scene, len(data))
    data[begin:end] = scene.random.randbytes(end - begin)
    return scene.write(name, data)


@kind
def a_range_moved(scene: Scene) -> set[str]:
    """Bytes cut out in one place and put in again in another: the size is as it was."""
    data = scene.read(name := scene.any())
    begin, end = _range(scene, len(data))
    cut, rest = data[begin:end], data[:begin] + data[end:]
    at = scene.random.randrange(len(rest) + 1)
    return scene.write(name, rest[:at] + cut + rest[at:])


@kind
def truncated(scene: Scene) -> set[str]:
    data = scene.read(name := scene.any())
    return scene.write(name, data[: scene.random.choice((0, len(data) - 1, scene.random.randrange(len(data))))])


@kind
def extended(scene: Scene) -> set[str]:
    data = scene.read(name := scene.any())
    more = scene.random.randrange(1, 10_000)
    return scene.write(name, data + scene.random.choice((bytes(more), b" " * more, data[:more])))


@kind
def deleted(scene: Scene) -> set[str]:
    (scene.target / (name := scene.any())).unlink()
    return {name}


@kind
def replaced_by_a_directory(scene: Scene) -> set[str]:
    (scene.target / (name := scene.any())).unlink()
    (scene.target / name).mkdir()
    return {name}


@kind
def replaced_by_a_link_to_nowhere(scene: Scene) -> set[str]:
    (scene.target / (name := scene.any())).unlink()
    os.symlink(f"{name}.moved", scene.target / name)
    return {name}


@kind
def two_files_swapped(scene: Scene) -> set[str]:
    one, two = scene.random.sample(sorted(p.name for p in scene.target.iterdir()), 2)
    a, b = scene.read(one), scene.read(two)
    return scene.write(one, b) | scene.write(two, a)


@kind
def two_shards_swapped_with_their_checksums(scene: Scene) -> set[str]:
    touched: set[str] = set()
    for names in (sorted(p.name for p in scene.target.glob(f"*.{end}")) for end in ("safetensors", "crc32")):
        contents = [scene.read(n) for n in names]
        for name, data in zip(names, [*contents[1:], contents[0]], strict=True):
            touched |= scene.write(name, data)
    return touched


@kind
def two_blocks_of_a_shard_swapped(scene: Scene) -> set[str]:
    """Of the size that checksums cover, or of a file system's or a disk's."""
    data = scene.read(name := scene.shard())
    size = scene.random.choice([s for s in (BLOCK, BLOCK // 4, 4096, 512) if s * 2 <= len(data)])
    one, two = (n * size for n in scene.random.sample(range(len(data) // size), 2))
    data[one : one + size], data[two : two + size] = data[two : two + size], data[one : one + size]
    return scene.write(name, data)


@kind
def one_shard_copied_over_another(scene: Scene) -> set[str]:
    names = sorted(p.name for p in scene.target.glob("*.safetensors"))
    return scene.write(names[0], scene.read(names[-1]))


@kind
def a_foreign_file_in_its_place(scene: Scene) -> set[str]:
    name = scene.random.choice((MANIFEST, scene.any()))
    size = (scene.target / name).stat().st_size
    content = scene.random.choice(
        (scene.random.randbytes(size), b"{}\n", b"[" * 200_000, b"null", b"\xff\xfe\x00", b"9" * 5000, b'{"a": NaN}')
    )
    return scene.write(name, content)


@kind
def the_same_file_of_another(scene: Scene) -> set[str]:
    other = scene.other()
    name = scene.random.choice(sorted(p.name for p in other.iterdir()))
    if name == MANIFEST:
        return the_manifest_of_another(scene)
    return scene.take(other, name)


@kind
def a_shard_and_its_checksums_of_another(scene: Scene) -> set[str]:
    name = scene.shard()
    return scene.take(scene.other(), name, name.replace("safetensors", "crc32"))


@kind
def the_manifest_with_the_shards_of_another(scene: Scene) -> set[str]:
    other = scene.other()
    return scene.take(other, *(p.name for p in other.iterdir() if p.name != MANIFEST))


@kind
def the_manifest_of_another(scene: Scene) -> set[str]:
    scene.take(scene.other(), MANIFEST)
    return {p.name for p in scene.target.iterdir()}  # any of them may be told to be the one that does not fit


@kind
def the_index_of_another(scene: Scene) -> set[str]:
    return scene.take(scene.other(), INDEX, "index.offsets")


@kind
def all_of_another(scene: Scene) -> set[str]:
    """The whole directory under this name."""
    shutil.rmtree(scene.target)
    shutil.copytree(scene.other(), scene.target)
    return {MANIFEST, scene.target.name}


@kind
def all_but_the_manifest_deleted(scene: Scene) -> set[str]:
    touched = {p.name for p in scene.target.iterdir()} - {MANIFEST}
    for name in touched:
        (scene.target / name).unlink()
    return touched


@kind
def everything_deleted(scene: Scene) -> set[str]:
    for path in list(scene.target.iterdir()):
        path.unlink()
    return {MANIFEST}


@kind
def the_manifest_edited(scene: Scene) -> set[str]:
    """Stays JSON. Its own checksum is left as it is, or goes too."""
    manifest = json.loads(scene.read(MANIFEST))
    _edit(scene.random, manifest)
    if scene.random.random() < 0.2:
        manifest.pop("crc32", None)
    return scene.write(MANIFEST, json.dumps(manifest, indent=2).encode())


@kind
def a_line_of_the_index_edited(scene: Scene) -> set[str]:
    """Stays JSON, keeps its length."""
    lines = scene.read(INDEX).decode().splitlines()
    number = scene.random.randrange(len(lines))
    digits = [i for i, c in enumerate(lines[number]) if c.isdecimal()]
    at = scene.random.choice(digits)
    digit = scene.random.choice([d for d in "123456789" if d != lines[number][at]])
    lines[number] = lines[number][:at] + digit + lines[number][at + 1 :]
    return scene.write(INDEX, "".join(f"{line}\n" for line in lines).encode())


@kind
def lines_of_the_index_reordered(scene: Scene) -> set[str]:
    lines = scene.read(INDEX).splitlines(keepends=True)
    one, two = scene.random.sample(range(len(lines)), 2)
    lines[one], lines[two] = lines[two], lines[one]
    return scene.write(INDEX, b"".join(lines))


@kind
def the_manifest_formatted_anew(scene: Scene) -> set[str]:
    """No corruption: the same values in other words. It must load."""
    manifest = json.loads(scene.read(MANIFEST))
    return scene.write(MANIFEST, json.dumps(manifest, indent=7, sort_keys=True).encode())


def _edit(choice: random.Random, value: Any) -> None:
    """Change one value somewhere inside."""
    while True:
        keys = sorted(value) if isinstance(value, dict) else list(range(len(value)))
        key = choice.choice(keys)
        if isinstance(value[key], dict | list) and value[key] and choice.random() < 0.8:
            value = value[key]
            continue
        old = value[key]
        if isinstance(value, dict) and choice.random() < 0.2:
            del value[key]
        elif isinstance(old, bool) or not isinstance(old, int | float):
            value[key] = choice.choice([v for v in ("", None, [], {}, 0, "step-00000010-a0001") if v != old])
        else:
            value[key] = choice.choice([v for v in (old + 1, old - 1, -old, 0, str(old), None) if v != old])
        return
