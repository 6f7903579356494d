"""Tokens: who may read, who may write, how a browser signs in."""

from __future__ import annotations

import httpx
import pytest

from api.auth import COOKIE, require_a_token
from cost_model.errors import RuleError
from db.repositories import TokenRepository
from db.session import Database
from tests.api.conftest import Serve
from tests.api.seed import spec


def token(database: Database, *scopes: str, lifetime_s: float | None = None) -> tuple[str, str]:
    with database.session() as session:
        row, text = TokenRepository(session).create("test", scopes, lifetime_s=lifetime_s)
        return row.id, text


def bearer(text: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {text}"}


def test_without_a_token_nothing_but_liveness_is_answered(serve: Serve) -> None:
    with serve(tokens_required=True) as served:
        for path in ("/v1/sweeps", "/v1/plans", "/v1/models", "/v1/cost-models", "/readyz", "/metrics"):
            answer = served.client.get(path)
            assert answer.status_code == 401, path
            assert answer.headers["www-authenticate"].startswith("Bearer")
        assert served.client.get("/healthz").status_code == 200
        assert served.client.get("/v1/sweeps", headers=bearer("fp_guess")).status_code == 401


def test_scopes_hold(serve: Serve, database: Database) -> None:
    _, reader = token(database, "read")
    _, writer = token(database, "write")
    with serve(tokens_required=True) as served:
        assert served.client.get("/v1/sweeps", headers=bearer(reader)).status_code == 200
        refused = served.client.post("/v1/sweeps", headers=bearer(reader), json=spec())
        assert refused.status_code == 403
        assert "write" in refused.json()["rule"]
        assert served.client.get("/v1/sweeps", headers=bearer(writer)).status_code == 403


def test_a_revoked_or_expired_token_ends_at_once(serve: Serve, database: Database) -> None:
    token_id, text = token(database, "read")
    _, old = token(database, "read", lifetime_s=-1.0)
    with serve(tokens_required=True) as served:
        assert served.client.get("/v1/sweeps", headers=bearer(text)).status_code == 200
        assert served.client.get("/v1/sweeps", headers=bearer(old)).status_code == 401
        with database.session() as session:
            TokenRepository(session).revoke(token_id)
        assert served.client.get("/v1/sweeps", headers=bearer(text)).status_code == 401


def test_use_is_remembered(serve: Serve, database: Database) -> None:
    token_id, text = token(database, "read")
    with serve(tokens_required=True) as served:
        served.client.get("/v1/sweeps", headers=bearer(text))
    with database.reading() as session:
        used = {row.id: row.last_used_at for row in TokenRepository(session).all()}
    assert used[token_id] is not None


def test_an_open_address_needs_a_token_to_exist(database: Database) -> None:
    with pytest.raises(RuleError) as refused:
        require_a_token(database, "0.0.0.0")
    assert "flatpeak token create" in refused.value.remedy
    token(database, "read")
    require_a_token(database, "0.0.0.0")


def test_a_browser_signs_in_and_out(serve: Serve, database: Database) -> None:
    _, text = token(database, "read", "write")
    with serve(tokens_required=True) as served, httpx.Client(base_url=served.address) as browser:
        sent_away = browser.get("/plans?cursor=abc")
        assert sent_away.status_code == 303
        assert sent_away.headers["location"] == "/login?next=%2Fplans%3Fcursor%3Dabc"
        assert browser.get("/login").status_code == 200
        assert browser.post("/login", data={"token": "fp_wrong", "next": "/"}).status_code == 401
        entered = browser.post("/login", data={"token": text, "next": "/plans"})
        assert entered.status_code == 303
        assert entered.headers["location"] == "/plans"
        cookie = entered.headers["set-cookie"]
        assert cookie.startswith(f"{COOKIE}=")
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert browser.get("/plans").status_code == 200
        assert browser.get("/v1/plans").status_code == 200
        browser.post("/logout")
        assert browser.get("/plans").status_code == 303


@pytest.mark.parametrize("target", ["//evil.example", "https://evil.example", "/\\evil.example", "evil"])
def test_signing_in_never_leads_to_another_site(serve: Serve, database: Database, target: str) -> None:
    _, text = token(database, "read")
    with serve(tokens_required=True) as served:
        answer = served.client.post("/login", data={"token": text, "next": target})
        assert answer.headers["location"] == "/"
