"""What supervisor and agents agree on besides messages: environment variables and the proof of belonging together."""

from __future__ import annotations

import hashlib
import hmac

# In the environment of agents. The token is a secret of this attempt, never in a file or an argument list.
ADDRESSES = "STOKER_SUPERVISOR"  # host:port,host:port,... in the order to try
TOKEN = "STOKER_TOKEN"
ATTEMPT = "STOKER_ATTEMPT"
LEASE = "STOKER_LEASE"  # seconds
NODE = "STOKER_NODE"  # the node's name where Slurm gives none
INSIDE = "STOKER_INSIDE"  # set in a container, to its runtime
SUBMISSION = "STOKER_SUBMISSION"  # in the batch script's: the token that its job was submitted with
WARNED = "STOKER_WARNED"  # set by the batch script if the warning came before the supervisor was up


def answer(token: str, nonce: str) -> str:
    """The answer to a supervisor's challenge."""
    return hmac.new(token.encode(), nonce.encode(), hashlib.sha256).hexdigest()
