"""API keys and TLS: who is let in, in whose name, by both servers and by the commands."""

from __future__ import annotations

import asyncio
import base64
import re
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx
import openai
import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from fixtures.fake_core import FakeCore
from fixtures.fake_gateway import ADMIN_KEY, MODEL, FakeGateway
from grpc_health.v1 import health_pb2, health_pb2_grpc
from typer.testing import CliRunner

from shoal_cluster.cli import app
from shoal_cluster.commands.client import GatewayClient
from shoal_cluster.commands.gateway_access import GatewayAccess, split_address
from shoal_cluster.config import ClusterConfig
from shoal_cluster.gateway_settings import GatewaySettings, with_keys
from shoal_cluster.serve.access import Access
from shoal_cluster.serve.call import GenerateCall
from shoal_cluster.serve.ingress import Ingress
from shoal_protos import control_pb2, generation_pb2
from shoal_replica.errors import ConfigError, Unauthenticated, Unavailable
from shoal_replica.sampling_params import SamplingParams

KEYS = {"alice": "sk-a", "bob": "sk-b"}
FREE = {"grpc_address": "127.0.0.1:0", "http_address": "127.0.0.1:0"}
RPCS = (
    ("Generation/Generate", generation_pb2.GenerateRequest(text="hi")),
    ("Generation/Tokenize", generation_pb2.TokenizeRequest(text="hi")),
    ("Generation/GetModel", generation_pb2.GetModelRequest()),
    ("Control/ListReplicas", control_pb2.ListReplicasRequest()),
    ("Control/ExplainRoute", control_pb2.ExplainRouteRequest(request_id="x")),
    ("Control/GetScaling", control_pb2.GetScalingRequest()),
)


@asynccontextmanager
async def opened(core: FakeGateway, **settings: object) -> AsyncIterator[Ingress]:
    ingress = await Ingress.open(core, GatewaySettings(**FREE, **settings))  # type: ignore[arg-type]
    try:
        yield ingress
    finally:
        await ingress.close(asyncio.sleep(0))


def call() -> GenerateCall:
    return GenerateCall(request_id="a", text="hi", sampling_params=SamplingParams(), tenant="somebody")


@pytest.fixture
def certificate(tmp_path: Path) -> dict[str, Path]:
    authority = trustme.CA()
    own = authority.issue_cert("127.0.0.1", "localhost")
    paths = {name: tmp_path / f"{name}.pem" for name in ("tls_cert", "tls_key", "ca")}
    own.cert_chain_pems[0].write_to_path(paths["tls_cert"])
    own.private_key_pem.write_to_path(paths["tls_key"])
    authority.cert_pem.write_to_path(paths["ca"])
    return paths


async def all_are_refused(channel: grpc.aio.Channel, metadata: Sequence[tuple[str, str]]) -> None:
    """Every RPC ends with UNAUTHENTICATED."""
    for name, request in RPCS:
        rpc = channel.unary_stream if name.endswith("Generate") else channel.unary_unary
        made = rpc(f"/shoal.v1.{name}")(request.SerializeToString(), metadata=metadata, timeout=10)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await (anext(aiter(made)) if name.endswith("Generate") else made)  # type: ignore[arg-type]
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_calls_are_made_in_the_name_of_the_keys_tenant() -> None:
    core = FakeGateway(api_keys=KEYS)
    async with opened(core) as ingress:
        for key, tenant in (("sk-a", "alice"), ("sk-b", "bob"), (ADMIN_KEY, "admin")):
            async with GatewayClient(f"127.0.0.1:{ingress.grpc_port}", GatewayAccess(key)) as client:
                assert "".join([chunk.text async for chunk in client.generate(call())]) == core.text
                spoofed = (("authorization", f"bearer {key}"), ("x-tenant", "somebody"))
                request = generation_pb2.GenerateRequest(text="hi").SerializeToString()
                channel = client._channel.unary_stream("/shoal.v1.Generation/Generate")
                assert [raw async for raw in channel(request, metadata=spoofed, timeout=10)]
                await client.cluster()
                await client.scaling()
            url = f"http://127.0.0.1:{ingress.http_port}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as http:
                await http.chat.completions.create(
                    model=MODEL,
                    messages=[{"role": "user", "content": "hi"}],
                    user="somebody",
                    extra_headers={"x-tenant": "somebody"},
                )
            assert [made.tenant for made in core.calls] == [tenant] * 3
            core.calls.clear()


@pytest.mark.parametrize(
    "header", [None, "Bearer sk-c", "Bearer", "sk-a", "Basic c2stYQ==", "Basic ?", "Basic é", "Bearer é"]
)
async def test_nobody_else_is_let_in(header: str | None) -> None:
    core = FakeGateway(api_keys=KEYS)
    headers = [] if header is None else [(b"authorization", header.encode("latin-1"))]
    async with opened(core) as ingress, httpx.AsyncClient(base_url=f"http://127.0.0.1:{ingress.http_port}") as http:
        paths = ("/v1/models", "/healthz/x", "/healthzz", "/metrics", "/docs", "/nowhere")
        paths += ("/dashboard", "/dashboard/data", "/dashboard/controls")
        answers = [await http.get(path, headers=headers) for path in paths]
        answers += [await http.post(path, json={}, headers=headers) for path in ("/v1/chat/completions", "/v1/models")]
        for answer in answers:
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            challenges = answer.headers.get_list("www-authenticate")
            assert challenges[0] == "Bearer"
            # A browser asks for a password; a script of the page, which has sent a key, is not interrupted by that.
            is_browser = header is None or header.startswith("Basic")
            assert [c.split()[0] for c in challenges[1:]] == (["Basic"] if is_browser else [])
            assert answer.headers["x-request-id"]
        assert (await http.get("/healthz")).status_code == (await http.get("/health")).status_code == 200
        assert (await http.post("/tokenize", json={"prompt": "x"}, headers=headers)).status_code == 401
        metadata = tuple((name.decode(), header or "") for name, _ in headers) if header and header.isascii() else ()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{ingress.grpc_port}") as channel:
            await all_are_refused(channel, metadata)
            health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
            assert health.status == health_pb2.HealthCheckResponse.SERVING
    assert core.calls == []
    assert core.num_unread == 2  # one chat, one Generate


@pytest.mark.parametrize("keys", [("sk-a", "no"), ("no", "sk-a"), ("sk-a", "sk-b")])
async def test_of_several_keys_none_is_believed(keys: tuple[str, str]) -> None:
    """Whoever has checked one of them, as a proxy does, and we might not mean the same."""
    async with opened(FakeGateway(api_keys=KEYS)) as ingress:
        url = f"http://127.0.0.1:{ingress.http_port}"
        async with httpx.AsyncClient(base_url=url) as http:
            headers = [("authorization", f"Bearer {key}") for key in keys]
            assert (await http.get("/v1/models", headers=headers)).status_code == 401
            assert (await http.get("/v1/models", headers=[("x-api-key", key) for key in keys])).status_code == 401
        async with grpc.aio.insecure_channel(f"127.0.0.1:{ingress.grpc_port}") as channel:
            await all_are_refused(channel, headers)


async def test_a_browser_sends_the_key_as_a_password() -> None:
    async with opened(FakeCore(api_keys=KEYS)) as ingress:
        url = f"http://127.0.0.1:{ingress.http_port}/dashboard"
        async with httpx.AsyncClient(auth=("anybody", "sk-b")) as http:
            assert (await http.get(url)).status_code == 200
            assert (await http.get(f"{url}/data")).status_code == 200
            key = {"authorization": f"Bearer {ADMIN_KEY}"}
            assert (await http.get(f"{url}/controls", headers=key, auth=None)).status_code == 200
            assert (await http.get(f"{url}/controls")).status_code == 403


@pytest.mark.parametrize("origins", [("http://page:3000",), ("*",)])
async def test_pages_of_other_origins_may_call_if_that_is_allowed(origins: tuple[str, ...]) -> None:
    page = {"origin": "http://page:3000"}
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, x-tenant"}
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    async with opened(FakeGateway(api_keys=KEYS), cors_origins=origins) as ingress:
        url = f"http://127.0.0.1:{ingress.http_port}/v1/chat/completions"
        async with httpx.AsyncClient() as http:
            asked = await http.options(url, headers=page | asks)
            assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, origins[0])
            assert "authorization" in asked.headers["access-control-allow-headers"]
            for key, status in (("sk-a", 200), ("no", 401)):
                answer = await http.post(url, json=chat, headers=page | {"authorization": f"Bearer {key}"})
                assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, origins[0])
            if origins != ("*",):
                other = {"origin": "http://other"}
                assert (await http.options(url, headers=other | asks)).status_code == 400
    async with opened(FakeGateway()) as ingress, httpx.AsyncClient() as http:
        url = f"http://127.0.0.1:{ingress.http_port}/v1/chat/completions"
        assert "access-control-allow-origin" not in (await http.post(url, json=chat, headers=page)).headers


async def test_tls_serves_both_and_nothing_in_the_clear(certificate: dict[str, Path]) -> None:
    core = FakeGateway(api_keys=KEYS)
    own = {name: certificate[name] for name in ("tls_cert", "tls_key")}
    async with opened(core, **own) as ingress:
        context = ssl.create_default_context(cafile=certificate["ca"])
        async with httpx.AsyncClient(verify=context, base_url=f"https://127.0.0.1:{ingress.http_port}") as http:
            answer = await http.get("/v1/models", headers={"authorization": "Bearer sk-a"})
            assert answer.status_code == 200
        address, access = f"127.0.0.1:{ingress.grpc_port}", GatewayAccess("sk-a", certificate["ca"])
        async with GatewayClient(f"https://{address}", access) as client:
            assert "".join([chunk.text async for chunk in client.generate(call())]) == core.text
        for name, how in ((address, access), (f"https://{address}", GatewayAccess("sk-a"))):  # not TLS; unknown CA
            async with GatewayClient(name, how) as client:
                with pytest.raises(Unavailable, match="certificate is not one of SHOAL_TLS_CA, or only one of the two"):
                    await client.cluster()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{ingress.http_port}") as http:
            with pytest.raises(httpx.HTTPError):
                await http.get("/healthz")


async def test_the_commands_take_key_and_authority_from_the_environment(
    certificate: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {name: certificate[name] for name in ("tls_cert", "tls_key")}

    def shoal(*arguments: str) -> str:
        result = CliRunner().invoke(app, arguments)
        return result.output + str(result.exception or "")

    async with opened(FakeCore(api_keys=KEYS), **own) as ingress:
        status = ("status", "--address", f"https://127.0.0.1:{ingress.grpc_port}")
        top = ("top", "--once", "--address", f"https://127.0.0.1:{ingress.http_port}")
        monkeypatch.setenv("SHOAL_TLS_CA", str(certificate["ca"]))
        for command in (status, top):
            assert "API key" in await asyncio.to_thread(shoal, *command)
        monkeypatch.setenv("SHOAL_API_KEY", "sk-b")
        for command in (status, top):
            assert "smollm2-135m-instruct" in await asyncio.to_thread(shoal, *command)
        monkeypatch.setenv("SHOAL_TLS_CA", str(certificate["tls_key"]))
        for command in (status, top):
            assert "cannot be read as PEM" in await asyncio.to_thread(shoal, *command)
        monkeypatch.delenv("SHOAL_TLS_CA")
        for command in (status, top):
            assert "SHOAL_TLS_CA" in await asyncio.to_thread(shoal, *command)
        monkeypatch.setenv("SHOAL_TLS_CA", "/nowhere.pem")
        for command in (status, top):
            assert "SHOAL_TLS_CA: /nowhere.pem cannot be read" in await asyncio.to_thread(shoal, *command)


def test_without_keys_everybody_may_call() -> None:
    assert Access({}, "secret").tenant_of(None) is None
    assert Access({}, None).tenant_of("Bearer x") is None
    access = Access(KEYS, None)
    basic = base64.b64encode(b"me:sk-a").decode()
    assert (access.tenant_of("Bearer sk-b"), access.tenant_of(f"Basic {basic}")) == ("bob", "alice")
    with pytest.raises(Unauthenticated, match="is needed"):
        access.tenant_of(None)


@pytest.mark.parametrize(
    ("gateway", "message"),
    [
        ({"api_keys": {"a": "x y"}}, "api_keys: the key of 'a' must be printable ASCII"),
        ({"api_keys": {"a": ""}}, "api_keys: the key of 'a' must be printable ASCII"),
        ({"api_keys": {"a": "x", "b": "x"}}, "api_keys: two tenants have the same key"),
        (
            {"api_keys": {"a": "x y"[0]}, "admin_key": "x"},
            "api_keys: two tenants have the same key, or one has the admin",
        ),
        ({"api_keys": {"a b": "x"}}, "api_keys: got the tenant 'a b'; must match"),
        ({"api_keys": {"admin": "x"}}, "api_keys: got the tenant 'admin'"),
        ({"api_keys": {"a": 123456}}, "gateway.api_keys.a: got a secret; input should be a valid string"),
        ({"admin_key": " x"}, "admin_key: must be printable ASCII without spaces at its ends"),
        ({"admin_key": "schl\u00fcssel"}, "admin_key: must be printable ASCII without spaces at its ends"),
        ({"api_keys": "x y"}, "gateway.api_keys: got a secret; input should be"),
        ({"tls_cert": "x"}, "tls_cert and tls_key must be given together"),
    ],
)
def test_wrong_settings_are_named_and_keys_are_not_shown(gateway: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        ClusterConfig.from_args({"model": "m", "gateway": gateway})
    assert not re.search("x y|123456", str(error.value))


def test_keys_come_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_API_KEYS", "alice=sk-a=1, bob=sk-b")
    monkeypatch.setenv("SHOAL_ADMIN_KEY", "root")
    made = with_keys({"gateway": {"num_replicas": 2}})["gateway"]
    assert made == {"num_replicas": 2, "api_keys": {"alice": "sk-a=1", "bob": "sk-b"}, "admin_key": "root"}
    assert with_keys({"gateway": {"api_keys": {}}})["gateway"]["api_keys"] == made["api_keys"], "nobody lets all in so"
    both = with_keys({"gateway": {"api_keys": {"carol": "sk-c"}}})["gateway"]["api_keys"]
    assert both == {"alice": "sk-a=1", "bob": "sk-b", "carol": "sk-c"}
    with pytest.raises(ConfigError, match=r"gateway\.api_keys: 'bob' has a key in SHOAL_API_KEYS, too"):
        with_keys({"gateway": {"api_keys": {"bob": "sk-x"}}})
    for wrong in ("sk-a", "alice=", "=sk-a", "alice=sk-a,", "alice=sk-a,alice=sk-b"):
        monkeypatch.setenv("SHOAL_API_KEYS", wrong)
        with pytest.raises(ConfigError, match="SHOAL_API_KEYS: must be tenant=key pairs"):
            with_keys({})
    monkeypatch.delenv("SHOAL_API_KEYS")
    monkeypatch.delenv("SHOAL_ADMIN_KEY")
    assert with_keys({"model": "m"}) == {"model": "m"}


def test_keys_may_be_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    settings = GatewaySettings.model_validate(FREE | {"api_keys": {"carol": "sk-c"}, "api_keys_file": file})
    for content, message in (
        (None, "cannot be read"),
        ("# none\n\n", "has no keys"),
        ("alice", "must be tenant=key pairs"),
        ("alice=sk-c", "two tenants have the same key"),
        ("admin=x", "got the tenant 'admin'"),
    ):
        if content is not None:
            file.write_text(content)
        with pytest.raises(ConfigError, match=f"gateway.api_keys_file: {file}: {message}"):
            settings.api_secrets()
    file.write_text("# ours\nalice = sk-a\n\nbob=sk=b\n")
    assert settings.api_secrets() == {"carol": "sk-c", "alice": "sk-a", "bob": "sk=b"}
    assert settings.without_secrets().api_secrets() == {}


async def test_an_encrypted_key_is_refused(certificate: dict[str, Path]) -> None:
    key = serialization.load_pem_private_key(certificate["tls_key"].read_bytes(), None)
    encryption = serialization.BestAvailableEncryption(b"x")
    formats = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    certificate["tls_key"].write_bytes(key.private_bytes(*formats, encryption))
    own = {name: certificate[name] for name in ("tls_cert", "tls_key")}
    with pytest.raises(ConfigError, match="tls_key: must not be encrypted"):
        await Ingress.open(FakeGateway(), GatewaySettings.model_validate(FREE | own))


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("ftp://x:1", "address: got 'ftp://x:1'; must be host:port"),
        ("http://http://x", "address: got"),
        ("", "address"),
    ],
)
def test_addresses_that_are_none_are_refused(address: str, message: str) -> None:
    for command in ("status", "top"):
        result = CliRunner().invoke(app, (command, "--address", address, *(["--once"] if command == "top" else [])))
        assert message in result.output + str(result.exception)


def test_addresses_may_have_a_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    assert split_address("HTTPS://h:1/") == ("https://", "h:1")
    assert split_address("[::1]:1") == ("http://", "[::1]:1")
    monkeypatch.setenv("SHOAL_API_KEY", "sk\n")
    with pytest.raises(ConfigError, match="SHOAL_API_KEY: must be printable ASCII"):
        GatewayAccess.from_environment()
    assert "sk-secret" not in repr(GatewayAccess("sk-secret"))


async def test_a_certificate_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "cert").write_text("no")
    (tmp_path / "k").write_text("no")
    for name in ("cert", "gone"):
        with pytest.raises(ConfigError, match=f"gateway.tls_cert: {tmp_path / name}"):
            await Ingress.open(FakeGateway(), GatewaySettings(**FREE, tls_cert=tmp_path / name, tls_key=tmp_path / "k"))
