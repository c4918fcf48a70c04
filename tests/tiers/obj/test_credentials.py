# SPDX-License-Identifier: Apache-2.0
"""The whole AWS chain, each source for real: what requests are signed with, what happens at the end
of credentials, and if their source hangs, fails or says no."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import itertools
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvtier.errors import ConfigError, TierLostError
from kvtier.testing.contract import Arena, chunk, context, make_env
from kvtier.tiers.base import TierContext
from kvtier.tiers.obj import bulk as bulk_module
from kvtier.tiers.obj import control as control_module
from kvtier.tiers.obj.errors import StoreError
from kvtier.tiers.obj.metrics import METRICS
from kvtier.tiers.obj.options import ObjOptions
from kvtier.tiers.obj.tier import OPEN_SECONDS, ObjTier
from kvtier.types import Outcome, Presence
from tests.tiers.obj.memory_store import MemoryStore, error
from tests.tiers.obj.scripted import Peer, answer, playing
from tests.tiers.obj.servers import moto

pytestmark = [pytest.mark.asyncio(loop_factories=["uvloop"]), pytest.mark.timed]

SIZE = 4096
_SIGNED = re.compile(r"Credential=([^/]+)/")


def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of this machine's own sources."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    alone(monkeypatch, tmp_path)
    monkeypatch.setattr(bulk_module, "PAUSE_SECONDS", 0.005)


class Store(MemoryStore):
    """Minds who signed, and refuses what has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.signed: Counter[tuple[str, str]] = Counter()
        """By access key and token."""
        self.ended: set[str] = set()
        """Tokens."""
        self.ends_at: dict[str, float] = {}
        """Of tokens, in seconds since 1970."""
        self.refuse = self._judge

    def _judge(self, method: str, path: str, headers: dict[str, str]) -> bytes | None:
        match = _SIGNED.search(headers["authorization"])
        assert match is not None
        token = headers.get("x-amz-security-token", "")
        self.signed[match[1], token] += 1
        if token in self.ended or time.time() >= self.ends_at.get(token, time.time() + 1):
            return error(400, "ExpiredToken") if method != "HEAD" else answer(400)
        return None


class Bench:
    """A tier that takes its credentials from the environment."""

    def __init__(self, tier: ObjTier, store: Store) -> None:
        self.tier = tier
        self.store = store
        self.arena = Arena(64, SIZE)
        self._slots = itertools.cycle(range(64))

    async def put(self, number: int) -> Outcome:
        key, payload = chunk(number, 0, SIZE)
        slot = self.arena.slot(next(self._slots), key, SIZE, payload)
        (outcome,) = await self.tier.store([slot], context())
        return outcome

    async def ask(self, number: int) -> list[Presence]:
        return await self.tier.exists([chunk(number, 0, SIZE)[0]], context())

    async def get(self, number: int, seconds: float = 10.0) -> Outcome:
        key, payload = chunk(number, 0, SIZE)
        slot = self.arena.slot(next(self._slots), key, SIZE)
        (outcome,) = await self.tier.load([slot], TierContext(time.monotonic() + seconds))
        assert outcome is not Outcome.DONE or bytes(slot.view) == payload
        return outcome


def a_tier(port: int) -> ObjTier:
    options = ObjOptions(bucket="bucket", endpoint_override=f"http://127.0.0.1:{port}")
    return ObjTier("obj", options, make_env(sizes=[SIZE], definitions=METRICS))


@contextlib.asynccontextmanager
async def bench(store: Store | None = None) -> AsyncIterator[Bench]:
    store = store or Store()
    async with playing(store) as port:
        tier = a_tier(port)
        await tier.open()
        try:
            yield Bench(tier, store)
        finally:
            await tier.aclose(time.monotonic() + 5)


def written(seconds: float) -> str:
    """So long from now, as AWS writes it."""
    then = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)
    return then.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Source:
    """A metadata server of an instance (IMDSv2) and of a container, and STS.

    Attributes
    ----------
    life_seconds : float
        Of what it gives next.
    mood : str
        ``well``, ``hangs``, or ``fails``.
    """

    def __init__(self, store: Store | None = None, life_seconds: float = 3600.0) -> None:
        self.store = store
        self.life_seconds = life_seconds
        self.mood = "well"
        self.given = 0
        self.requests: Counter[str] = Counter()
        self.token_files: list[str] = []

    def credentials(self) -> dict[str, str]:
        self.given += 1
        token = f"token-{self.given}"
        if self.store is not None:
            self.store.ends_at[token] = time.time() + self.life_seconds
        return {
            "AccessKeyId": f"ASIA{self.given}",
            "SecretAccessKey": "hush-hush",
            "Token": token,
            "Expiration": written(self.life_seconds),
        }

    async def __call__(self, peer: Peer) -> None:
        while True:
            line, headers, body = await peer.request()
            method, path, _ = line.split(" ")
            self.requests[f"{method} {path}"] += 1
            if self.mood == "hangs":
                await peer.gone()
                return
            if self.mood == "fails":
                await peer.send(answer(500, b"so"))
            elif path == "/container":
                assert headers["authorization"] == "Bearer mine"
                await peer.send(answer(200, json.dumps(self.credentials()).encode()))
            elif path == "/latest/api/token":
                assert method == "PUT"
                assert "x-aws-ec2-metadata-token-ttl-seconds" in headers
                await peer.send(answer(200, b"SESSION"))
            elif headers.get("x-aws-ec2-metadata-token") == "SESSION":
                role = "/latest/meta-data/iam/security-credentials/"
                code = {"Code": "Success", "Type": "AWS-HMAC"}
                said = "a-role" if path == role else json.dumps(self.credentials() | code)
                assert path in (role, f"{role}a-role")
                await peer.send(answer(200, said.encode()))
            elif b"AssumeRoleWithWebIdentity" in body:
                if self.mood == "refuses":
                    said = (
                        b"<ErrorResponse><Error><Code>AccessDenied</Code></Error></ErrorResponse>"
                    )
                    await peer.send(answer(403, said, [("Content-Type", "text/xml")]))
                    continue
                given = self.credentials()
                given["SessionToken"] = given.pop("Token")
                fields = "".join(f"<{name}>{value}</{name}>" for name, value in given.items())
                text = (
                    "<AssumeRoleWithWebIdentityResponse "
                    'xmlns="https://sts.amazonaws.com/doc/2011-06-15/">'
                    f"<AssumeRoleWithWebIdentityResult><Credentials>{fields}</Credentials>"
                    "</AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"
                )
                await peer.send(answer(200, text.encode(), [("Content-Type", "text/xml")]))
            else:
                await peer.send(answer(401))


def use(kind: str, url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the operator, or the orchestrator, sets for such a source."""
    if kind == "instance":
        monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", url)
    elif kind == "container":
        (tmp_path / "authorization").write_text("Bearer mine")
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{url}/container")
        monkeypatch.setenv(
            "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "authorization")
        )
    else:
        (tmp_path / "jwt").write_text("a.web.token")
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "jwt"))
        monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/reader")
        monkeypatch.setenv("AWS_ROLE_SESSION_NAME", "kvtier")
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", url)
        monkeypatch.setenv("AWS_REGION", "eu-west-3")


def configure(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[str, str]:
    """Credentials that stand somewhere; their access key and token."""
    if kind == "environment":
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDENV")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
        monkeypatch.setenv("AWS_SESSION_TOKEN", "token-env")
        return "AKIDENV", "token-env"
    keys = "aws_access_key_id = {}\naws_secret_access_key = hush-hush\n"
    if kind == "file":
        (tmp_path / "credentials").write_text("[default]\n" + keys.format("AKIDFILE"))
        return "AKIDFILE", ""
    if kind == "profile":
        (tmp_path / "credentials").write_text(
            "[default]\n" + keys.format("OTHER") + "[mine]\n" + keys.format("AKIDMINE")
        )
        monkeypatch.setenv("AWS_PROFILE", "mine")
        return "AKIDMINE", ""
    given = {
        "Version": 1,
        "AccessKeyId": "AKIDRUN",
        "SecretAccessKey": "hush-hush",
        "SessionToken": "token-run",
        "Expiration": written(3600),
    }
    (tmp_path / "say.py").write_text(f"print('''{json.dumps(given)}''')")
    (tmp_path / "config").write_text(
        f"[default]\ncredential_process = {sys.executable} {tmp_path}/say.py\n"
    )
    return "AKIDRUN", "token-run"


@pytest.mark.parametrize("kind", ["environment", "file", "profile", "process"])
async def test_credentials_that_stand_somewhere(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = configure(kind, monkeypatch, tmp_path)
    async with bench() as made:
        assert await made.put(1) is Outcome.DONE
        assert await made.get(1) is Outcome.DONE
        assert set(made.store.signed) == {expected}


@pytest.mark.parametrize("kind", ["instance", "container", "web identity"])
async def test_credentials_of_a_role(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = Source()
    async with playing(source) as port:
        use(kind, f"http://127.0.0.1:{port}", monkeypatch, tmp_path)
        async with bench() as made:
            assert await made.put(1) is Outcome.DONE
            assert await made.get(1) is Outcome.DONE
            assert set(made.store.signed) == {("ASIA1", "token-1")}
            assert source.given == 1


async def test_a_web_identity_of_a_real_sts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """moto's; the first token is called expired, and twenty requests get one new one."""
    with moto(tmp_path) as server:
        use("web identity", server.url, monkeypatch, tmp_path)
        async with bench() as made:
            assert await made.put(1) is Outcome.DONE
            ((access_key, token),) = set(made.store.signed)
            assert access_key.startswith("ASIA")
            assert len(token) > 100
            made.store.ended.add(token)
            outcomes = await asyncio.gather(*(made.get(1) for _ in range(20)))
            assert outcomes == [Outcome.DONE] * 20
            assert len(set(made.store.signed)) == 2


@pytest.mark.fault("O12")
@pytest.mark.parametrize("kind", ["instance", "container", "web identity"])
async def test_short_lived_credentials_are_renewed_once_for_all(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They live for a second and a half, and eight workers go on for five: no request fails, though
    botocore takes those of an instance for good a quarter of an hour longer than they are."""
    monkeypatch.setattr(control_module, "AGAIN_SECONDS", 0.5)
    store = Store()
    source = Source(store, life_seconds=1.5)
    async with playing(source) as port:
        use(kind, f"http://127.0.0.1:{port}", monkeypatch, tmp_path)
        async with bench(store) as made:
            assert await made.put(1) is Outcome.DONE
            started = time.monotonic()
            outcomes: Counter[Outcome] = Counter()

            async def work() -> None:
                while time.monotonic() < started + 5.0:
                    outcomes[await made.get(1)] += 1
                    await asyncio.sleep(0.01)

            async with asyncio.TaskGroup() as group:
                for number in range(8):
                    group.create_task(work(), name=f"work-{number}")
            seconds = time.monotonic() - started
            assert set(outcomes) == {Outcome.DONE}
            assert sum(outcomes.values()) > 100
            # A new one for each that ended at least; never two at a time.
            assert len(set(store.signed)) >= 3
            assert 3 <= source.given <= seconds / 0.5 + 3


@pytest.mark.parametrize("kind", ["container", "web identity"])
async def test_a_source_that_hangs_holds_up_nobody(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """While the credentials are good nobody waits for it; at their end nobody beyond its own
    deadline; when it is back, all is well without help."""
    monkeypatch.setattr(control_module, "AGAIN_SECONDS", 0.2)
    store = Store()
    source = Source(store, life_seconds=4.0)
    async with playing(source) as port:
        use(kind, f"http://127.0.0.1:{port}", monkeypatch, tmp_path)
        async with bench(store) as made:
            assert await made.put(1) is Outcome.DONE
            source.mood = "hangs"
            last_end = max(store.ends_at.values())
            slowest = 0.0
            asked = sum(source.requests.values())
            while time.time() < last_end - 1.5:
                started = time.monotonic()
                assert await made.get(1) is Outcome.DONE
                slowest = max(slowest, time.monotonic() - started)
                await asyncio.sleep(0.01)
            assert slowest < 1.5  # the source's own patience is two seconds and more
            assert asked < sum(source.requests.values()) < asked + 12
            await asyncio.sleep(max(0.0, last_end - time.time()) + 1.1)
            waited = []
            for _ in range(20):
                started = time.monotonic()
                assert await made.get(1, 0.3) in (Outcome.TIMEOUT, Outcome.DENIED)
                waited.append(time.monotonic() - started)
            assert max(waited) < 1.5
            # Between two questions to the source the answer is known at once.
            assert min(waited) < 0.1
            source.mood = "well"
            until = time.monotonic() + 5.0
            while await made.get(1, 0.3) is not Outcome.DONE:
                assert time.monotonic() < until


START_ERRORS = {
    ("container", "hangs"): (TierLostError, "has not answered within 4 s: check"),
    ("web identity", "hangs"): (TierLostError, "the source of the credentials"),
    ("instance", "hangs"): (ConfigError, "AWS_METADATA_SERVICE_TIMEOUT"),
    ("container", "fails"): (TierLostError, "the source of the credentials"),
    ("web identity", "fails"): (TierLostError, "the source of the credentials fails"),
    ("instance", "fails"): (ConfigError, "give access_key and secret_key"),
    ("web identity", "refuses"): (ConfigError, "AccessDenied"),
}


@pytest.mark.parametrize(("kind", "mood"), START_ERRORS)
async def test_a_source_that_does_not_work_at_the_start(
    kind: str, mood: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected, advice = START_ERRORS[kind, mood]
    source = Source()
    source.mood = mood
    async with playing(source) as port, playing(Store()) as store_port:
        use(kind, f"http://127.0.0.1:{port}", monkeypatch, tmp_path)
        tier = a_tier(store_port)
        started = time.monotonic()
        with pytest.raises(expected) as caught:
            await tier.open()
        assert time.monotonic() - started < OPEN_SECONDS
        text = str(caught.value)
        assert advice in text
        assert "\n" not in text
        assert "hush" not in text
        source.mood = "well"
        await tier.open()
        await tier.aclose(time.monotonic() + 5)


@pytest.mark.parametrize("wrong", ["no token file", "no profile", "nothing"])
async def test_a_chain_without_credentials_says_what_is_wrong(
    wrong: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    advice = "give access_key and secret_key"
    if wrong == "no token file":
        use("web identity", "http://127.0.0.1:1", monkeypatch, tmp_path)
        (tmp_path / "jwt").unlink()
        advice = str(tmp_path / "jwt")
    elif wrong == "no profile":
        monkeypatch.setenv("AWS_PROFILE", "absent")
        advice = "absent"
    tier = a_tier(1)
    with pytest.raises(ConfigError) as caught:
        await tier.open()
    assert advice in str(caught.value)


@pytest.mark.fault("O12", "O13")
@pytest.mark.parametrize("call", ["load", "exists"])
async def test_keys_in_a_file_that_is_written_anew(
    call: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As daemons do that hand out keys: the file is read again when the store says expired, or
    answers a question with the 400 that is all a HEAD can say of it."""
    lines = "[default]\naws_access_key_id = {0}\naws_secret_access_key = hush\n"
    lines += "aws_session_token = token-{0}\n"
    (tmp_path / "credentials").write_text(lines.format("AKID1"))
    monkeypatch.setattr(control_module, "AGAIN_SECONDS", 0.1)
    async with bench() as made:
        assert await made.put(1) is Outcome.DONE
        made.store.ended.add("token-AKID1")
        if call == "load":
            assert await made.get(1) is Outcome.DENIED
        else:
            made.tier.forget_presence()
            with pytest.raises(TierLostError, match="expired"):
                await made.ask(1)
        (tmp_path / "credentials").write_text(lines.format("AKID2"))
        await asyncio.sleep(0.11)
        if call == "exists":
            assert await made.ask(1) == [Presence.PRESENT]
        outcomes = await asyncio.gather(*(made.get(1) for _ in range(20)))
        assert outcomes == [Outcome.DONE] * 20
        assert {one for one, _ in made.store.signed} == {"AKID1", "AKID2"}


async def test_a_request_that_is_cancelled_leaves_the_renewal_to_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = Source(store := Store())
    async with playing(source) as port:
        use("container", f"http://127.0.0.1:{port}", monkeypatch, tmp_path)
        async with bench(store) as made:
            assert await made.put(1) is Outcome.DONE
            store.ended.add("token-1")
            tasks = [asyncio.create_task(made.get(1), name="get") for _ in range(8)]
            control = made.tier._control
            assert control is not None
            while control._renewal is None:
                await asyncio.sleep(0.001)
            for task in tasks[:4]:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            assert ends[4:] == [Outcome.DONE] * 4
            assert source.given == 2


async def test_a_listing_goes_on_over_a_renewal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = Source(store := Store())
    judge = store.refuse

    def refuse(method: str, path: str, headers: dict[str, str]) -> bytes | None:
        if "list-type" not in path:
            return judge(method, path, headers)
        last = "continuation-token" in path
        more = "<IsTruncated>true</IsTruncated><NextContinuationToken>2</NextContinuationToken>"
        one = "<Contents><Key>k</Key><Size>1</Size>"
        one += "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
        page = f"<ListBucketResult>{'' if last else more}{one}</ListBucketResult>"
        return answer(200, page.encode(), [("Content-Type", "application/xml")])

    store.refuse = refuse
    async with playing(source) as port:
        use("container", f"http://127.0.0.1:{port}", monkeypatch, tmp_path)
        async with bench(store) as made:
            assert await made.put(1) is Outcome.DONE
            control = made.tier._control
            assert control is not None
            pages = 0
            async for page in control.list(""):
                assert [one.name for one in page] == ["k"]
                pages += 1
                store.ended.add("token-1")
                assert await made.get(1) is Outcome.DONE
            assert pages == 2
            assert source.given == 2


async def test_a_listing_does_not_wait_for_a_source_that_hangs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """botocore asks it by itself then, with patience for five minutes, and nobody else can."""
    monkeypatch.setattr(control_module, "STS_SECONDS", 0.2)
    source = Source(Store(), life_seconds=1.0)
    async with playing(source) as port:
        use("web identity", f"http://127.0.0.1:{port}", monkeypatch, tmp_path)
        async with bench() as made:
            source.mood = "hangs"
            await asyncio.sleep(1.0)
            control = made.tier._control
            assert control is not None
            started = time.monotonic()
            with pytest.raises(StoreError):
                await control.delete(["a"])
            assert time.monotonic() - started < 3.0
