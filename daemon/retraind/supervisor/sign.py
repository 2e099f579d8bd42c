"""`publish.sign`: the operator's program that signs a manifest before the commit. Nothing unsigned passes it.

It is given the manifest's path as its last argument and prints the detached signature. The caller waits, so the time
is bounded well below that of the watchdog. Raises PublishError sign_failed, which is tried again as a whole.
"""

from collections.abc import Sequence
from pathlib import Path

from retraind.errors import PublishError
from retraind.supervisor import program

# The unit's watchdog has 60 s and is answered by the thread that waits here.
_SECONDS = 10.0
_MAX_BYTES = 2**16
_REMEDY = "run it by hand as the service's user, with the path of a manifest"


def signature_of(manifest: Path, command: Sequence[str]) -> bytes:
    """What the program printed. Raises PublishError."""
    try:
        signature = program.ask([*command, str(manifest)], _SECONDS, _MAX_BYTES)
    except (OSError, program.Failed) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise PublishError("sign_failed", f"publish.sign: {command[0]}: {why}", remedy=_REMEDY) from error
    if not signature:
        raise PublishError("sign_failed", f"publish.sign: {command[0]} printed no signature", remedy=_REMEDY)
    return signature
