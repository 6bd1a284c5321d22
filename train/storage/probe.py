"""`python -m stoker.train.storage.probe s3://BUCKET/PREFIX`: whether checkpoints can be kept there, asked at launch.

Owns: the question, and its answer for the launcher: exit code 3 without a client, 1 if the store refuses.
"""

from __future__ import annotations

import errno
import secrets
import sys

from .bucket import Bucket


def main(address: str) -> int:
    """List, write and delete one small object."""
    bucket = Bucket(f"{address.rstrip('/')}/")
    key = f".stoker-probe-{secrets.token_hex(4)}"
    try:
        bucket.probe()
        bucket.put(key, b"")
        bucket.delete([key])
    except OSError as e:
        is_missing = e.errno == errno.ENOPKG
        print(e.strerror if is_missing else f"{e.filename}: {e.strerror}", file=sys.stderr)
        return 3 if is_missing else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
