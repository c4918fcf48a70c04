# SPDX-License-Identifier: Apache-2.0
"""The object tier opens: the trial of a bucket, TLS, stores that are not there."""

from __future__ import annotations

import asyncio
import ssl
import time
from pathlib import Path

import pytest

from kvtier.errors import ConfigError, TierLostError
from kvtier.testing.contract import Arena, chunk, context, make_env
from kvtier.tiers.obj import bulk as bulk_module
from kvtier.tiers.obj.metrics import METRICS
from kvtier.tiers.obj.tier import ObjTier
from kvtier.types import Outcome
from tests.tiers.obj.memory_store import MemoryStore, error
from tests.tiers.obj.rig import SIZE, bench, options
from tests.tiers.obj.scripted import Peer, answer, certificate, playing

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("quick")]


TRIALS = {
    "no store": (lambda m, p, h: answer(404), ConfigError, "check endpoint_override"),
    "forbidden": (lambda m, p, h: error(403, "AccessDenied"), ConfigError, "s3:PutObject"),
    "wrong key": (
        lambda m, p, h: error(403, "InvalidAccessKeyId"),
        ConfigError,
        "check access_key",
    ),
    "bucket": (lambda m, p, h: error(404, "NoSuchBucket"), ConfigError, "create_bucket: true"),
    "clock": (lambda m, p, h: error(403, "RequestTimeTooSkewed"), ConfigError, "clock"),
    "region": (
        lambda m, p, h: error(301, "PermanentRedirect", ("x-amz-bucket-region", "eu-west-3")),
        ConfigError,
        "region eu-west-3",
    ),
    "region of a new bucket": (
        lambda m, p, h: error(400, "InvalidLocationConstraint"),
        ConfigError,
        "set region to",
    ),
    "expired": (lambda m, p, h: error(400, "ExpiredToken"), ConfigError, "renew"),
    "busy": (lambda m, p, h: error(503, "SlowDown"), TierLostError, "slow_down"),
    "broken": (lambda m, p, h: error(500, "InternalError"), TierLostError, "server"),
    "full": (lambda m, p, h: error(403, "QuotaExceeded"), TierLostError, "raise the quota"),
    "hangs up": (lambda m, p, h: b"", TierLostError, "reset"),
    "not http": (lambda m, p, h: b"hello\r\n\r\n", ConfigError, "scheme and port"),
    "other bytes": (
        lambda m, p, h: answer(200, bytes(64)) if m == "GET" else None,
        ConfigError,
        "other bytes",
    ),
    "no reads": (
        lambda m, p, h: error(403, "AccessDenied") if m == "GET" else None,
        ConfigError,
        "s3:GetObject",
    ),
    "no deletes": (
        lambda m, p, h: error(403, "AccessDenied") if m == "DELETE" else None,
        ConfigError,
        "s3:DeleteObject",
    ),
}


async def test_a_full_store_opens_and_is_read(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    async with bench(store) as made:
        assert await made.put(1) == [Outcome.DONE]
    for gone in (False, True):
        if gone:
            store.objects = {
                name: found for name, found in store.objects.items() if name.endswith(".kv")
            }
        caplog.clear()
        store.refuse = lambda m, p, h: error(403, "QuotaExceeded") if m == "PUT" else None
        async with bench(store) as made:
            assert "nothing can be stored: make room, or raise the quota" in caplog.text
            assert await made.put(2) == [Outcome.FULL]
            assert await made.get(1) == (Outcome.DONE, True)
            store.refuse = lambda m, p, h: None
            assert await made.put(2) == [Outcome.DONE]
            await made.tier.forget([chunk(2, 0, SIZE)[0]])


@pytest.mark.fault("O11", "O18", "U09")
@pytest.mark.parametrize("name", TRIALS)
async def test_the_trial_says_what_to_do(name: str) -> None:
    refuse, kind, advice = TRIALS[name]
    store = MemoryStore()
    store.refuse = refuse
    async with playing(store) as port:
        tier = ObjTier("obj", options(port), make_env(sizes=[SIZE], definitions=METRICS))
        with pytest.raises(kind) as caught:
            await tier.open()
        text = str(caught.value)
        assert advice in text
        assert "\n" not in text
        assert "hush" not in text
        # What was written is gone, where that is permitted.
        left = [path for path in store.objects if "trial" in path]
        assert len(left) == (name == "no deletes")
        # It may be opened again, when the operator has mended it.
        store.refuse = lambda method, path, headers: None
        await tier.open()
        await tier.aclose(time.monotonic() + 5)
        assert [path for path in store.objects if "trial" in path] == []


async def test_a_bucket_is_made_when_asked_for() -> None:
    store = MemoryStore()
    store.buckets.clear()
    async with bench(store, create_bucket=True) as made:
        assert await made.put(1) == [Outcome.DONE]
        assert store.buckets == {"bucket"}


@pytest.mark.parametrize("knows", [True, False])
async def test_conditional_writes_where_the_store_knows_them(knows: bool) -> None:
    store = MemoryStore()
    if not knows:
        real = store.right
        store.right = lambda method, path, headers, body: real(  # type: ignore[method-assign]
            method, path, {k: v for k, v in headers.items() if k != "if-none-match"}, body
        )
    async with bench(store) as made:
        assert made.tier._features.conditional is knows
        await made.put(1)
        made.tier.forget_presence()
        assert await made.put(1) == [Outcome.EXISTS if knows else Outcome.DONE]
        assert await made.put(1) == [Outcome.EXISTS]
        assert store.requests["PUT"] == 2


async def test_a_bucket_that_takes_nothing_unencrypted() -> None:
    """The objects of the trial, too, are written with what the options ask for."""
    store = MemoryStore()
    wanted = {"x-amz-server-side-encryption": "aws:kms", "x-amz-storage-class": "ONEZONE_IA"}
    store.refuse = lambda method, path, headers: (
        error(403, "AccessDenied")
        if method == "PUT" and not wanted.items() <= headers.items()
        else None
    )
    async with bench(store, sse="aws:kms", storage_class="ONEZONE_IA") as made:
        assert made.tier._features.conditional
        assert await made.put(1) == [Outcome.DONE]
        assert any(path.endswith("namespace.json") for path in store.objects)


async def test_namespace_json_stands_beside_the_data() -> None:
    async with bench() as made:
        name = f"/bucket/{made.tier.prefix}namespace.json"
        assert b"org/model" in made.store.objects[name][0]
        assert [path for path in made.store.objects if "trial" in path] == []


@pytest.mark.parametrize("content", [b"", b"<html>", b"{}", b'{"format": "x"}'])
async def test_a_namespace_json_that_is_damaged(content: bytes) -> None:
    async with bench() as made:
        name = f"/bucket/{made.tier.prefix}namespace.json"
        store = made.store
    store.objects[name] = content, {}
    with pytest.raises(ConfigError, match=r"namespace\.json: is damaged: .*delete that object"):
        async with bench(store):
            pytest.fail("it opened")
    assert store.objects[name][0] == content


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return certificate(tmp_path_factory.mktemp("tls"))


def server_tls(certificates: tuple[Path, Path]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificates)
    return context


async def test_tls_with_an_authority_of_ones_own(certificates: tuple[Path, Path]) -> None:
    """The body is not hashed for the signature: the transport protects it."""
    store = MemoryStore()
    sent: list[str] = []

    def watch(method: str, path: str, headers: dict[str, str]) -> bytes | None:
        if method == "PUT":
            sent.append(headers["x-amz-content-sha256"])
        return None

    store.refuse = watch
    tls = server_tls(certificates)
    ca = str(certificates[0])
    async with playing(store, tls) as port:
        made = options(port, endpoint_override=f"https://127.0.0.1:{port}", ca_bundle=ca)
        tier = ObjTier("obj", made, make_env(sizes=[1 << 20], definitions=METRICS))
        await tier.open()
        arena = Arena(8, 1 << 20)
        try:
            for number in range(4):
                key, payload = chunk(number, 0, 1 << 20)
                slot = arena.slot(number, key, 1 << 20, payload)
                assert await tier.store([slot], context()) == [Outcome.DONE]
                assert store.objects[f"/bucket/{tier.name_of(key)}"][0] == payload
                back = arena.slot(4 + number, key, 1 << 20)
                assert await tier.load([back], context()) == [Outcome.DONE]
                assert bytes(back.view) == payload
        finally:
            await tier.aclose(time.monotonic() + 5)
    assert set(sent) == {"UNSIGNED-PAYLOAD"}


@pytest.mark.parametrize("how", ["variable", "file"])
async def test_whom_aws_trusts_is_trusted(
    certificates: tuple[Path, Path], tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the bulk path as by botocore, where the options name no file."""
    config = tmp_path / "config"
    config.write_text(f"[default]\nca_bundle = {certificates[0]}\n" if how == "file" else "")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    if how == "variable":
        monkeypatch.setenv("AWS_CA_BUNDLE", str(certificates[0]))
    async with playing(MemoryStore(), server_tls(certificates)) as port:
        made = options(port, endpoint_override=f"https://127.0.0.1:{port}")
        tier = ObjTier("obj", made, make_env(sizes=[SIZE], definitions=METRICS))
        await tier.open()
        await tier.aclose(time.monotonic() + 5)


@pytest.mark.parametrize(
    ("wrong", "advice"),
    [
        ("no trust", "set ca_bundle"),
        ("other name", "set ca_bundle"),
        ("no tls there", "speaks no TLS: write http:// in endpoint_override"),
        ("tls there", "speaks TLS, write https:// in endpoint_override"),
    ],
)
async def test_tls_that_does_not_work_says_so(
    certificates: tuple[Path, Path], tmp_path: Path, wrong: str, advice: str
) -> None:
    store = MemoryStore()
    if wrong == "other name":
        certificates = certificate(tmp_path, "DNS:elsewhere")
    tls = None if wrong == "no tls there" else server_tls(certificates)
    scheme = "http" if wrong == "tls there" else "https"
    ca = None if wrong == "no trust" else str(certificates[0])
    async with playing(store, tls) as port:
        made = options(port, endpoint_override=f"{scheme}://127.0.0.1:{port}", ca_bundle=ca)
        tier = ObjTier("obj", made, make_env(sizes=[SIZE], definitions=METRICS))
        kind = TierLostError if wrong == "tls there" else ConfigError
        with pytest.raises(kind) as caught:
            await tier.open()
        assert advice in str(caught.value)


@pytest.mark.parametrize("content", [None, b"", b"no certificate\n"])
async def test_a_ca_bundle_that_is_none(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_bytes(content)
    made = options(9, endpoint_override="https://127.0.0.1:9", ca_bundle=str(path))
    tier = ObjTier("obj", made, make_env(sizes=[SIZE], definitions=METRICS))
    with pytest.raises(ConfigError, match=r"ca_bundle '.*ca\.pem' is no file of certificates: \S"):
        await tier.open()
    await tier.aclose(time.monotonic() + 5)


async def test_a_port_that_hangs_up_on_tls_is_told_with_a_reason() -> None:
    async def play(peer: Peer) -> None:
        """Accepts, and closes."""

    async with playing(play) as port:
        made = options(port, endpoint_override=f"https://127.0.0.1:{port}")
        tier = ObjTier("obj", made, make_env(sizes=[SIZE], definitions=METRICS))
        with pytest.raises(TierLostError, match=r"connect: 127\.0\.0\.1:\d+: \w"):
            await tier.open()
        await tier.aclose(time.monotonic() + 5)


@pytest.mark.fault("U09")
async def test_a_store_that_does_not_accept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a firewall that drops packets: the time for a connection bounds it, four times."""

    async def never(host: str, port: int, context: object) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(bulk_module, "connect", never)
    tier = ObjTier(
        "obj", options(1, connect_seconds=0.1), make_env(sizes=[SIZE], definitions=METRICS)
    )
    started = time.monotonic()
    with pytest.raises(TierLostError, match=r"did not accept within 0.1 s"):
        await tier.open()
    assert time.monotonic() - started < 3.0


@pytest.mark.parametrize(
    ("endpoint", "advice"),
    [
        ("http://store.invalid", "check endpoint_override and the DNS"),
        ("http://127.0.0.1:1", "check host and port of endpoint_override"),
    ],
)
async def test_a_store_that_is_not_there_may_come(endpoint: str, advice: str) -> None:
    tier = ObjTier(
        "obj",
        options(1, endpoint_override=endpoint),
        make_env(sizes=[SIZE], definitions=METRICS),
    )
    with pytest.raises(TierLostError) as caught:
        await tier.open()
    assert advice in str(caught.value)
    assert "\n" not in str(caught.value)
