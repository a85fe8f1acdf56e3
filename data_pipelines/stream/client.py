"""The callers' side of the ledger. Every call may be repeated, so a ledger that is restarted is waited for."""

from __future__ import annotations

import logging
import ssl
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Iterable
from typing import Any

import httpx

from ..errors import UserError
from . import StreamError
from .messages import MAX_TEXT, MAX_WAIT_SECONDS, finite
from .wants import Lease, Location, Want

log = logging.getLogger(__name__)

_WANTS_PER_REQUEST = 16  # bounds the size of a request when a whole window is wanted again
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0


class LedgerClient:
    """Serves several threads. patience: seconds for which an unreachable ledger is called again before StreamError.

    `instance` is the id of the ledger that answered last: another one means that the ledger has forgotten everything,
    because it was restarted or a new session began. `stop` (an event) ends waiting early: the calls then raise
    StreamError. ca_file: PEM file of the authority that signed the ledger's certificate (or of the certificate itself).
    """

    def __init__(self, url: str, token: str, *, patience: float = 60.0, ca_file: str = ""):
        try:
            address = httpx.URL(url)
        except httpx.InvalidURL:
            address = httpx.URL("")
        if address.scheme not in ("http", "https") or not address.host:
            raise UserError(f"the ledger's address {url!r} is not http://host:port", fix="the ledger prints its own")
        self.url, self.instance, self.stop = url.rstrip("/"), "", threading.Event()
        self.asked_to_reconcile = False
        self._patience = patience
        self._http = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(10.0, connect=5.0),
            verify=_trust(ca_file),
            trust_env=False,  # a proxy for the outside world does not lead to the ledger
        )

    # Trainer ranks

    def want(self, wants: Iterable[Want]) -> None:
        waiting = [{**vars(want), "input_ids": b64encode(want.input_ids).decode()} for want in wants]
        for start in range(0, len(waiting), _WANTS_PER_REQUEST):
            self._call("POST", "/want", {"wants": waiting[start : start + _WANTS_PER_REQUEST]})

    def locate(self, want: str, *, wait: float = MAX_WAIT_SECONDS) -> Location:
        """Returns early when the want is stored, failed or unknown, else its state after `wait` seconds."""
        answer = self._call("POST", "/locate", {"want": want, "wait": wait})
        return Location(**{name: answer[name] for name in Location.__dataclass_fields__})

    def lost(self, want: str, lease: str, reason: str, *, removed: bool = False) -> bool:
        """removed: the rank has removed the object, so that it takes no room in the window any more."""
        body = {"want": want, "lease": lease, "reason": _plain(reason), "removed": removed}
        return self._call("POST", "/lost", body)["accepted"]

    def consumed(self, want: str, lease: str, *, removed: bool = True) -> str:
        """The rank has what it wanted; lease "": it does without, a failed pack is thereby quarantined.

        Returns the key of an object that nobody will read, to be removed from the store, or "".
        """
        return self._call("POST", "/consumed", {"want": want, "lease": lease, "removed": removed})["remove"]

    def report(self, report: dict[str, Any], *, patience: float = 0.0) -> str:
        """How a rank stands, for the status page; see `messages.Report`. Returns the ledger's instance.

        Raises StreamError at once when the ledger does not answer: the next report is as good.
        """
        return self._call("POST", "/report", finite(report), patience=patience)["instance"]

    # Producers

    def config(self) -> dict[str, Any]:
        return self._call("GET", "/config")

    def lease(
        self, producer: str, features: str, *, wait: float = MAX_WAIT_SECONDS, about: dict[str, Any] | None = None
    ) -> tuple[Lease | None, bool]:
        """(a task or None, whether the run is finished). about: see `messages.About`. Sets `asked_to_reconcile`."""
        body = {"producer": producer, "features": features, "wait": wait, "about": about or {}}
        answer = self._call("POST", "/lease", body)
        self.asked_to_reconcile = answer["reconcile"]
        return _lease(answer["lease"]) if answer["lease"] else None, answer["finished"]

    def stored(self, producer: str, want: str, lease: str, size: int, checksum: str) -> bool:
        body = {"producer": producer, "want": want, "lease": lease, "size": size, "checksum": checksum}
        return self._call("POST", "/stored", body)["accepted"]

    def failed(self, producer: str, want: str, lease: str, reason: str) -> bool:
        body = {"producer": producer, "want": want, "lease": lease, "reason": _plain(reason)}
        return self._call("POST", "/failed", body)["accepted"]

    def reconcile(self, producer: str, keys: list[str]) -> set[str]:
        """keys: of all objects that the producer may still have in the store. Returns those that will be read.

        Room in the window is free when it is called again with what is left after removing the others.
        """
        return set(self._call("POST", "/reconcile", {"producer": producer, "keys": keys})["keep"])

    # Both, and people

    def finish(self, *, patience: float | None = None) -> None:
        """Tell all producers to end: no pack will be wanted in this session any more."""
        self._call("POST", "/finish", {}, patience=patience)

    def status(self, *, patience: float | None = None) -> dict[str, Any]:
        return self._call("GET", "/status", patience=patience)

    def close(self) -> None:
        self._http.close()

    def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, patience: float | None = None
    ) -> dict[str, Any]:
        patience = self._patience if patience is None else patience
        deadline, pause, warned = time.monotonic() + patience, _FIRST_PAUSE, False
        while True:
            try:
                response = self._http.request(method, path, json=body)
                if response.status_code not in (502, 503, 504):
                    return self._read(response, path)
                problem = f"it answers {response.status_code}"
            except httpx.TransportError as error:
                if _untrusted(error):
                    raise UserError(
                        f"the ledger's certificate is not trusted: {error}",
                        where=self.url,
                        fix="set source.ca_file (--ca-file) to the certificate of the ledger or of who signed it",
                    ) from error
                problem = f"{type(error).__name__}: {error}"
            if time.monotonic() + pause > deadline:
                raise StreamError(
                    f"the ledger has not answered for {patience:.0f} s: {problem}",
                    where=f"{self.url}{path}",
                    fix="look into logs/ledger.log; start the ledger again, then this process",
                )
            if not warned:
                log.warning("no answer from the ledger at %s (%s); calling again", self.url, problem)
                warned = True
            if self.stop.wait(pause):
                raise StreamError("closed while waiting for the ledger", where=self.url)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _read(self, response: httpx.Response, path: str) -> dict[str, Any]:
        if response.status_code == 401:
            raise UserError(
                "the ledger refused the token",
                where=self.url,
                fix="use the token of this very ledger: <run_dir>/ledger.token",
            )
        if response.status_code == 409:
            raise StreamError(
                "a newer trainer has taken over this ledger",
                where=self.url,
                fix="nothing, if this process is what is left of a trainer that was restarted; else give each its own",
            )
        if response.status_code != 200:
            raise StreamError(
                f"the ledger answers {response.status_code}: {response.text[:500]}", where=self.url + path
            )
        try:
            answer = response.json()
        except ValueError as error:
            raise StreamError(f"what answers is not a ledger: {response.text[:100]!r}", where=self.url) from error
        self.instance = answer.get("instance", self.instance)
        return answer


def _lease(written: dict[str, Any]) -> Lease:
    return Lease(**{**written, "input_ids": b64decode(written["input_ids"])})


def _trust(ca_file: str) -> ssl.SSLContext | bool:
    if not ca_file:
        return True
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise UserError(f"the certificate cannot be read: {error}", where=ca_file, fix="set source.ca_file") from error


def _untrusted(error: BaseException) -> bool:
    """Whether a failed connection will fail again, because the other side's certificate is not one to trust."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _plain(text: str) -> str:
    """A reason that can be sent: no halves of surrogate pairs (undecodable file names have them), not endless."""
    return text[:MAX_TEXT].encode("utf-8", "replace").decode()
