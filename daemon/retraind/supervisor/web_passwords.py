"""Basic authentication: an Authorization header against names and bcrypt hashes. The only importer of bcrypt.

bcrypt costs 50 ms to 1 s of a processor on purpose. So one is computed at a time, few may wait for it, and what a login
led to is remembered under a keyed hash, never the password itself. Unknown names cost what known ones cost. Raises
Busy when too many wait; loads bcrypt only when there are users.
"""

import base64
import binascii
import hashlib
import hmac
import secrets
import threading
from collections.abc import Callable

from retraind.config_file import Problems

_USERS = "basic_auth_users"
_REMEDY = "install python3-bcrypt, or `pip install 'retraind[auth]'` in the service's environment"
# More than any set of real scrapers. Refused logins are remembered apart, so that guesses push no good one out.
_MAX_REMEMBERED = 100
# Who guesses passwords must not gather threads: the next one is told to come back.
_MAX_WAITING = 16
_WAIT_SECONDS = 10.0
# bcrypt looks at no more; newer versions of the library refuse a longer one instead.
_MAX_PASSWORD_BYTES = 72


class Busy(Exception):
    """Too many logins are being checked: come back later."""


class Logins:
    """Checks of passwords, one at a time, and their results. Outlives the users, who can change on disk."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._turn = threading.Lock()
        self._places = threading.BoundedSemaphore(_MAX_WAITING)
        self._lock = threading.Lock()
        self._remembered: dict[bool, dict[bytes, None]] = {True: {}, False: {}}  # the oldest is the first
        self.num_computed = 0

    def recall(self, key: bytes) -> bool | None:
        """What this login led to before, or None."""
        with self._lock:
            return next((verdict for verdict, keys in self._remembered.items() if key in keys), None)

    def name(self, hashed: bytes, user: bytes, password: bytes) -> bytes:
        """Names a login without holding its password; a changed hash makes it another one."""
        message = b"".join(len(part).to_bytes(4, "big") + part for part in (hashed, user, password))
        return hmac.digest(self._secret, message, hashlib.sha256)

    def compute(self, check: Callable[[], bool], key: bytes) -> bool:
        """The verdict of a function that takes long, remembered. Raises Busy."""
        if not self._places.acquire(blocking=False):
            raise Busy
        try:
            if not self._turn.acquire(timeout=_WAIT_SECONDS):
                raise Busy
            try:
                known = self.recall(key)  # somebody with the same login was first
                verdict = check() if known is None else known
                self.num_computed += known is None
            finally:
                self._turn.release()
        finally:
            self._places.release()
        with self._lock:
            keys = self._remembered[verdict]
            keys[key] = None
            while len(keys) > _MAX_REMEMBERED:
                del keys[next(iter(keys))]
        return verdict


class Passwords:
    """The users of one web configuration."""

    def __init__(self, users: dict[str, str], logins: Logins, check: Callable[[bytes, bytes], bool]) -> None:
        self._users = {name.encode(): hashed.encode() for name, hashed in users.items()}
        # Whoever is unknown is checked against the costliest one, and refused whatever comes out.
        self._decoy = max(self._users.values(), key=lambda hashed: hashed[4:6])
        self._logins, self._check = logins, check

    def allow(self, authorization: str) -> bool:
        """Whether the header names a user and the right password. Raises Busy."""
        scheme, _, encoded = authorization.partition(" ")
        if scheme.lower() != "basic":
            return False
        try:
            user, colon, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
        except (binascii.Error, ValueError):
            return False
        if not colon:
            return False
        key = self._logins.name(self._users.get(user, b""), user, password)
        verdict = self._logins.recall(key)
        if verdict is None:
            verdict = self._logins.compute(lambda: self._is_right(user, password), key)
        return verdict

    def _is_right(self, user: bytes, password: bytes) -> bool:
        try:
            is_right = self._check(password[:_MAX_PASSWORD_BYTES], self._users.get(user, self._decoy))
        except ValueError:  # a NUL byte, which some versions refuse
            return False
        return is_right and user in self._users


def make_passwords(users: dict[str, str], logins: Logins, problems: Problems) -> Passwords | None:
    """The users, each hash tried; None when `problems` has grown."""
    try:
        import bcrypt
    except ImportError as error:
        problems.add_at(_USERS, f"needs the Python module bcrypt, which can not be loaded ({error}): {_REMEDY}")
        return None
    num_before = len(problems.found)
    for name, hashed in users.items():
        try:
            bcrypt.hashpw(b"", f"$2b$04${hashed[7:29]}".encode())  # the lowest cost: a millisecond
        except ValueError as error:
            problems.add_at(f"{_USERS}.{name}", f"is no hash that bcrypt can use ({error}): make it anew")
    return Passwords(users, logins, bcrypt.checkpw) if len(problems.found) == num_before else None
