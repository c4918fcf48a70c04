# SPDX-License-Identifier: Apache-2.0
"""A running server with OpenAI's interface (``vllm serve``): the workloads over HTTP, streamed.

Prompts are token ids, so that no tokenizer stands between. A thread for each request in flight,
each with a connection of its own; the main thread alone touches the source and the results. Owns
the threads, and ends them with their connections.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

import msgspec

from kvtier.bench.copies import CopyCounters
from kvtier.bench.drivers.standin import Finished, StepTimes
from kvtier.bench.report import run_line
from kvtier.bench.results import EngineCounts, Run, summarise
from kvtier.bench.settings import Settings
from kvtier.bench.strategies import SERVER
from kvtier.bench.workload import Request
from kvtier.errors import ConfigError, KVTierError

CONNECT_SECONDS = 10.0
REQUEST_SECONDS = 600.0
"""Longest silence inside one answer."""
POLL_SECONDS = 0.5
PROGRESS_SECONDS = 2.0

Say = Callable[[str], None]


class RequestError(KVTierError):
    """One request was not answered; `cause` is short, for counting."""

    def __init__(self, cause: str, text: str = "") -> None:
        super().__init__(f"{cause}: {text}" if text else cause)
        self.cause = cause


class Answered(msgspec.Struct, frozen=True):
    """One answer. Seconds since the start of the run."""

    first_token: float
    end: float
    output_tokens: int
    cached_tokens: int | None
    """Of the prompt; None if the server does not tell."""


class Client:
    """One server.

    Parameters
    ----------
    base_url : str
        With or without ``/v1`` at its end.
    """

    def __init__(self, base_url: str) -> None:
        parts = urllib.parse.urlsplit(base_url)
        self._url = base_url
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname or "", parts.port
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._open: set[http.client.HTTPConnection] = set()
        self._lock = threading.Lock()
        self._closed = False

    @contextlib.contextmanager
    def _connection(self, seconds: float) -> Any:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=CONNECT_SECONDS)
        with self._lock:
            self._open.add(connection)
        try:
            connection.connect()
            connection.sock.settimeout(seconds)
            if self._closed:
                raise ConnectionAbortedError
            yield connection
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def close(self) -> None:
        """Break off what is under way. Any thread."""
        with self._lock:
            self._closed = True
            for connection in self._open:
                if connection.sock is not None:
                    with contextlib.suppress(OSError):
                        connection.sock.shutdown(socket.SHUT_RDWR)

    def _headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["authorization"] = f"Bearer {key}"
        return headers

    def models(self) -> dict[str, int | None]:
        """Models that the server serves, and the longest context of each where it tells.

        Raises
        ------
        ConfigError
            If it does not answer as such a server does.
        """
        try:
            with self._connection(CONNECT_SECONDS) as connection:
                connection.request("GET", f"{self._path}/v1/models", headers=self._headers())
                response = connection.getresponse()
                body = response.read()
            if response.status != 200:
                raise ConfigError(
                    f"--base-url {self._url}: /v1/models answers with status {response.status}"
                    + ("; set OPENAI_API_KEY" if response.status in (401, 403) else "")
                )
            return {one["id"]: one.get("max_model_len") for one in json.loads(body)["data"]}
        except (OSError, http.client.HTTPException) as exc:
            raise ConfigError(
                f"--base-url {self._url}: no server answers there ({_cause(exc)}); start one with "
                "vllm serve MODEL, or name another address"
            ) from exc
        except (ValueError, KeyError, TypeError) as exc:
            raise ConfigError(
                f"--base-url {self._url}: what answers at /v1/models is no server with OpenAI's "
                "interface"
            ) from exc

    def complete(
        self, model: str, tokens: list[int], output_tokens: int, now: Callable[[], float]
    ) -> Answered:
        """One streamed answer of exactly `output_tokens`.

        Raises
        ------
        RequestError
            If the server refuses it, breaks off or takes too long.
        """
        body = {
            "model": model,
            "prompt": tokens,
            "max_tokens": max(1, output_tokens),
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            with self._connection(REQUEST_SECONDS) as connection:
                path = f"{self._path}/v1/completions"
                connection.request("POST", path, json.dumps(body), self._headers())
                response = connection.getresponse()
                if response.status != 200:
                    text = response.read(2000).decode(errors="replace")
                    raise RequestError(f"status {response.status}", " ".join(text.split())[:300])
                return self._read(response, now)
        except (OSError, http.client.HTTPException) as exc:
            raise RequestError(_cause(exc)) from exc
        except (ValueError, KeyError, TypeError) as exc:
            raise RequestError("not understood", repr(exc)[:200]) from exc

    @staticmethod
    def _read(response: http.client.HTTPResponse, now: Callable[[], float]) -> Answered:
        first = None
        usage: dict[str, Any] = {}
        for line in response:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                break
            event = json.loads(data)
            if "error" in event:
                raise RequestError("error in the stream", str(event["error"])[:300])
            if event.get("choices") and first is None:
                first = now()
            usage = event.get("usage") or usage
        else:
            raise RequestError("stream broke off")
        end = now()
        details = usage.get("prompt_tokens_details") or {}
        return Answered(
            first_token=end if first is None else first,
            end=end,
            output_tokens=int(usage.get("completion_tokens") or 0),
            cached_tokens=details.get("cached_tokens"),
        )


def _cause(exc: BaseException) -> str:
    if isinstance(exc, TimeoutError):
        return "timeout"
    if isinstance(exc, OSError) and exc.strerror:
        return exc.strerror.lower()
    return type(exc).__name__


class ServerRunner:
    """One invocation's runs against one server.

    Parameters
    ----------
    settings : Settings
    say : callable
        Takes the lines of the progress display.
    """

    def __init__(self, settings: Settings, say: Say) -> None:
        assert settings.real is not None
        assert settings.real.base_url is not None
        self._settings = settings
        self._say = say
        self._url = settings.real.base_url
        self._client: Client | None = None
        self.stopped = False
        self.notes: list[str] = []
        self.about: dict[str, str] = {"server": self._url}

    def stop(self) -> None:
        """End the run in progress; what was answered stays. Safe in a signal handler."""
        self.stopped = True

    def run(self) -> list[Run]:
        """All points of the sweep; those finished so far after `stop`.

        Raises
        ------
        ConfigError
            If the server does not answer, has no such model, or takes no prompts as long as these.
        """
        model, longest = self._choose()
        self.about |= {"model": model, "longest context": f"{longest or 'not told'}"}
        runs = []
        points = self._settings.points()
        for number, conversations in enumerate(points, 1):
            if self.stopped:
                break
            name = self._settings.point_name(conversations)
            self._say(f"point {number}/{len(points)}: {name}")
            runs.append(self._one(model, longest, conversations))
            self._say(f"  {SERVER:<8s}{run_line(runs[-1])}")
        return runs

    def _choose(self) -> tuple[str, int | None]:
        settings = self._settings
        assert settings.real is not None
        models = Client(self._url).models()
        wanted = settings.real.model
        if wanted is None and len(models) == 1:
            wanted = next(iter(models))
        if wanted is None or wanted not in models:
            raise ConfigError(
                f"--model {wanted or ''}: the server at {self._url} serves "
                f"{', '.join(models) or 'nothing'}"
            )
        longest = models[wanted]
        if settings.workload == "multiturn" and longest and settings.final_tokens() > longest:
            raise ConfigError(
                f"a conversation grows to {settings.final_tokens()} tokens and {wanted} takes "
                f"{longest}: lower --turns, --turn-tokens or --first-prompt-tokens"
            )
        return wanted, longest

    def _one(self, model: str, longest: int | None, conversations: int) -> Run:
        settings = self._settings
        source = settings.source(conversations, (longest or 1 << 62) - 1)
        skipped = getattr(source, "skipped", 0)
        if skipped:
            self.notes.append(f"{skipped} requests of the trace were too long for it: left out")
        client = Client(self._url)
        ended: queue.SimpleQueue[tuple[Request, Answered | RequestError]] = queue.SimpleQueue()
        start = time.perf_counter()

        def now() -> float:
            return time.perf_counter() - start

        def ask(request: Request) -> None:
            try:
                tokens = source.tokens(request)
                answer = client.complete(model, tokens, request.output_tokens, now)
            except RequestError as exc:
                ended.put((request, exc))
            else:
                ended.put((request, answer))

        threads: dict[str, threading.Thread] = {}
        finished: list[Finished] = []
        errors: dict[str, int] = {}
        told = PROGRESS_SECONDS
        untold = 0
        left = source.total
        try:
            while left and not self.stopped:
                for request in source.take(now()):
                    thread = threading.Thread(target=ask, args=(request,), name="bench-request")
                    threads[request.request_id] = thread
                    thread.start()
                due = source.next_start()
                limit = POLL_SECONDS if due is None else min(POLL_SECONDS, max(0.0, due - now()))
                with contextlib.suppress(queue.Empty):
                    request, answer = ended.get(timeout=limit)
                    threads.pop(request.request_id).join()
                    left -= 1
                    if isinstance(answer, RequestError):
                        if answer.cause not in errors:
                            self.notes.append(f"request {request.request_id}: {answer}")
                        errors[answer.cause] = errors.get(answer.cause, 0) + 1
                    else:
                        untold += answer.cached_tokens is None
                        finished.append(_finished(request, answer))
                    source.done(request, now())
                if now() > told:
                    told = now() + PROGRESS_SECONDS
                    self._say(
                        f"  {SERVER:<8s}{len(finished):4d}/{source.total} requests, "
                        f"{sum(errors.values())} errors"
                    )
            wall = max((one.end for one in finished), default=now())
        finally:
            client.close()
            for thread in threads.values():
                thread.join()
        if untold:
            self.notes.append(
                "the server does not tell how many tokens it had cached (vllm serve "
                "--enable-prompt-tokens-details); all are counted as computed"
            )
        return summarise(
            strategy=SERVER,
            point=str(conversations) if conversations else "trace",
            conversations=conversations,
            working_set_bytes=0,
            wall_seconds=wall,
            wanted=source.total,
            finished=finished,
            times=StepTimes(),
            copies=CopyCounters(),
            engine=EngineCounts(),
            interrupted=self.stopped,
            errors=errors,
        )


def _finished(request: Request, answer: Answered) -> Finished:
    cached = answer.cached_tokens or 0
    return Finished(
        request_id=request.request_id,
        turn=request.turn,
        intended_start=request.intended_start,
        first_token=answer.first_token,
        end=answer.end,
        prompt_tokens=request.prompt_tokens,
        output_tokens=answer.output_tokens,
        accelerator_tokens=0,
        loaded_tokens=cached,
        sources={SERVER: cached} if cached else {},
        computed_tokens=request.prompt_tokens - cached,
        deferred_seconds=0.0,
    )
