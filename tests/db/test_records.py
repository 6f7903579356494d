"""Plans, cost models, stored specifications, tokens and idempotency keys, on both databases."""

from __future__ import annotations

import pytest
from sqlalchemy import text

from cost_model.errors import RuleError
from db.repositories import (
    ClusterRepository,
    CostModelRepository,
    IdempotencyRepository,
    ModelRepository,
    PlanRepository,
    TokenRepository,
)
from db.session import Database


def test_a_plan_keeps_its_json_in_order_and_its_cost_model(database: Database) -> None:
    plan = {"verdict": "fits", "memory": {"z": 1, "a": 2**50}, "note": "β ≤ 10M"}
    with database.session() as session:
        plan_id = PlanRepository(session).add(plan, verdict="fits", cost_model_id="cm_1").id
    with database.reading() as session:
        kept = PlanRepository(session).find(plan_id)
        assert kept is not None
        assert (kept.plan_json, kept.cost_model_id) == (plan, "cm_1")
        assert list(kept.plan_json["memory"]) == ["z", "a"]
        assert PlanRepository(session).find("pln_none") is None
        assert [p.id for p in PlanRepository(session).page().items] == [plan_id]


def test_a_promoted_cost_model_replaces_the_last_of_its_hardware_only(database: Database) -> None:
    with database.session() as session:
        models = CostModelRepository(session)
        first = models.add("h200", {"v": 1}, promoted=True)
        other = models.add("h100", {"v": 1}, promoted=True)
        second = models.add("h200", {"v": 2}, report={"error": 0.1})
        assert (first.version, second.version, other.version) == (1, 2, 1)
        current = models.current("h200")
        assert current is not None
        assert current.id == first.id
        assert models.promote(second.id)
        assert not models.promote("cm_none")
    with database.reading() as session:
        models = CostModelRepository(session)
        current = models.current("h200")
        assert current is not None
        assert current.model_json == {"v": 2}
        assert models.current("h100") is not None
        assert models.current("h200 of another link graph") is None
        assert len(models.page(hardware_id="h200").items) == 2


def test_specifications_are_found_by_id_and_name_and_replaced_in_place(database: Database) -> None:
    with database.session() as session:
        model = ModelRepository(session).put("mine", {"layers": 2})
        again = ModelRepository(session).put("mine", {"layers": 3})
        cluster = ClusterRepository(session).put("lab", {"nodes": 1}, hardware_id="h")
        assert model.id == again.id
    with database.reading() as session:
        found = ModelRepository(session).find(model.id)
        assert found is not None
        assert found.spec_json == {"layers": 3}
        by_name = ClusterRepository(session).find("lab")
        assert by_name is not None
        assert by_name.id == cluster.id
        assert ClusterRepository(session).find("other") is None
        assert len(ModelRepository(session).page().items) == len(ClusterRepository(session).page().items) == 1


def test_a_token_is_kept_as_a_hash_and_ends_when_revoked_or_expired(database: Database) -> None:
    with database.session() as session:
        tokens = TokenRepository(session)
        assert not tokens.any_valid()
        row, secret = tokens.create("ci", ["write", "read"])
        _, expired = tokens.create("old", ["read"], lifetime_s=-1)
        with pytest.raises(RuleError, match="scopes"):
            tokens.create("bad", ["admin"])
    with database.session() as session:
        tokens = TokenRepository(session)
        assert tokens.verify(secret + "x") is None
        assert tokens.verify(expired) is None
        held = tokens.verify(secret)
        assert held is not None
        assert held.scopes_json == ["read", "write"]
        tokens.touch(held.id)
        stored = [str(v) for v in session.execute(text("SELECT * FROM token")).all()]
        assert all(secret not in v for v in stored)
        assert tokens.any_valid()
        assert tokens.revoke(row.id)
        assert not tokens.revoke(row.id)
        assert tokens.verify(secret) is None
        assert not tokens.any_valid()
        assert len(tokens.all()) == 2


def test_an_idempotency_key_stands_for_one_request(database: Database) -> None:
    with database.session() as session:
        keys = IdempotencyRepository(session)
        assert keys.find("sweeps", "k", {"a": 1, "b": 2}) is None
        assert keys.remember("sweeps", "k", {"a": 1, "b": 2}, "swp_1") == "swp_1"
    with database.session() as session:
        keys = IdempotencyRepository(session)
        assert keys.find("sweeps", "k", {"b": 2, "a": 1}) == "swp_1"
        assert keys.find("plans", "k", {}) is None
        assert keys.remember("sweeps", "k", {"a": 1, "b": 2}, "swp_2") == "swp_1"
        with pytest.raises(RuleError, match="one request"):
            keys.find("sweeps", "k", {"a": 2})
