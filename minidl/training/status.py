"""The status of a run, for a dashboard or for Kubeflow: one JSON object, in a file or by HTTPS, in the form that a
TrainJob of Kubeflow's trainer takes (kubeflow/trainer, docs/user-guides/trainjob-progress.md, 2.2).

A thread of rank 0 writes it. A step only leaves its number, so a slow or dead receiver neither slows the run nor ends
it: the first failure is one line, and the thread goes on trying.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

from ..system.files import check_writable, write_atomic

KUBEFLOW = "kubeflow"  #: the target whose URL, and the files of whose token and certificate, the environment names:
URL, TOKEN, CERTIFICATE = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "TOKEN", "CA_CERT"))
FILE_SECONDS, URL_SECONDS = 1.0, 5.0  #: between two writes; Kubeflow asks for at most one in five seconds
TIMEOUT = 5.0  #: seconds of a request


@dataclass(frozen=True)
class Target:
    """Where the status goes: a file, or a URL, with the files of a token and of the certificate of an authority that is
    trusted, by default the system's."""

    where: str
    is_url: bool
    token: str = ""
    certificate: str = ""

    @classmethod
    def of(cls, text: str, environment: Mapping[str, str] = os.environ) -> Target:
        """The target of --status. Raises ValueError or FileError in one line if nothing can be written there."""
        where = environment.get(URL, "") if text == KUBEFLOW else text
        if not where:
            raise ValueError(f"--status {KUBEFLOW}: {URL} is not set; a TrainJob sets it if its controller has the "
                             f"feature gate TrainJobStatus")
        if "://" not in where:
            check_writable(where)
            return cls(where, False)
        token, certificate = environment.get(TOKEN, ""), environment.get(CERTIFICATE, "")
        try:
            parts = urlsplit(where)
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            good = False
        if not good or not where.isascii() or any(c <= " " for c in where):
            raise ValueError(f"--status {where[:80]!r} is no address of the form https://HOST[:PORT]/PATH")
        if parts.scheme == "http" and token:
            raise ValueError(f"--status {where[:80]}: the token in {TOKEN} is sent over https alone")
        for name, file in ((TOKEN, token), (CERTIFICATE, certificate)):
            if file and not os.access(file, os.R_OK):
                raise ValueError(f"--status: {file}, which {name} names, cannot be read")
        return cls(where, True, token, certificate)

    def send(self, content: str) -> None:
        """Writes JSON to the file, or sends it by POST, with a bearer's token if there is one. It follows no redirect,
        which would carry the token to another host. Raises OSError or ValueError if the receiver does not take it."""
        if not self.is_url:
            write_atomic(self.where, content)
            return
        import ssl  # other runs need nothing of the web
        from urllib.request import HTTPRedirectHandler, HTTPSHandler, Request, build_opener

        class Stays(HTTPRedirectHandler):
            def redirect_request(self, *_: object) -> None:
                return None

        token = Path(self.token).read_text().strip() if self.token else ""  # it changes from time to time
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        opener = build_opener(Stays, HTTPSHandler(context=ssl.create_default_context(cafile=self.certificate or None)))
        with opener.open(Request(self.where, content.encode(), headers, method="POST"), timeout=TIMEOUT) as answer:
            answer.read(1 << 16)


@dataclass(frozen=True)
class Moment:
    """A run after a step. `record`: the last record of the log, or nothing."""

    step: int
    at: float
    record: Mapping[str, Any]


def body(now: Moment, before: Moment, steps: int, batch_size: int, predicted_s: float, loss: float | None
         ) -> dict[str, Any]:
    """The status `now`. `before`: the first moment after which the speed counts; `predicted_s`: of a step. The
    remaining time is measured as soon as two moments differ; until then it is predicted."""
    rest, ran = steps - now.step, now.step - before.step
    step_s = (now.at - before.at) / ran if ran > 0 else None
    predicted = rest * predicted_s
    remaining = predicted if step_s is None else rest * step_s
    metrics: dict[str, float | None] = {
        "step": now.step, "steps": steps, "loss": loss, "predicted_remaining_s": round(predicted, 1),
        "measured_remaining_s": None if step_s is None else round(rest * step_s, 1),
        "samples_per_s": None if not step_s else round(batch_size / step_s, 2)}
    metrics |= {name: value for name, value in now.record.items() if name in ("epoch", "lr")}
    return {"trainerStatus": {
        "progressPercentage": 100 * now.step // steps,
        "estimatedRemainingSeconds": min(round(remaining), (1 << 31) - 1),
        "metrics": [{"name": name, "value": f"{value:.6g}" if isinstance(value, float) else str(value)}
                    for name, value in metrics.items() if value is not None],
        "lastUpdatedTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}}


class Status:
    """Sends the status of a run of `steps` steps while it goes on. `done`: how many were run before. `loss()`:
    the last loss, or None; `warn(line)` says once that the receiver does not take it."""

    def __init__(self, target: Target, steps: int, done: int, batch_size: int, predicted_ms: float,
                 loss: Callable[[], float | None], warn: Callable[[str], None]) -> None:
        self._target, self._steps, self._batch_size, self._predicted = target, steps, batch_size, predicted_ms / 1000
        self._loss, self._warn, self._warned = loss, warn, False
        self._now = self._before = Moment(done, monotonic(), {})
        self._begun, self._over = False, threading.Event()
        self._thread = threading.Thread(target=self._work, name="status", daemon=True)
        self._thread.start()

    def tell(self, step: int, record: Mapping[str, Any]) -> None:
        """A step has ended; `record` as of `loop.Course.progress`."""
        self._now = Moment(step, monotonic(), record)
        if not self._begun:  # the first step fills caches
            self._begun, self._before = True, self._now

    def _work(self) -> None:
        while not self._over.is_set():
            self._send()
            self._over.wait(URL_SECONDS if self._target.is_url else FILE_SECONDS)
        self._send()

    def _send(self) -> None:
        now, loss = self._now, self._loss()
        content = body(now, self._before, self._steps, self._batch_size, self._predicted,
                       now.record.get("loss") if loss is None else loss)
        try:
            self._target.send(json.dumps(content) + "\n")
        except (OSError, ValueError) as error:
            if not self._warned:
                self._warned = True
                why = f"HTTP {error.code}" if hasattr(error, "code") else " ".join(str(error).split())[:200]
                self._warn(f"the status was not taken by {self._target.where}: {why}; the run goes on")

    def close(self) -> None:
        """Sends the last status; gives up on a receiver that takes longer than a request may."""
        self._over.set()
        self._thread.join(2 * TIMEOUT)
