"""Whatever workers, the reaper and users do, in any order, the rules of a trial's life hold."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from db.lifecycle import LIVE, MAX_LOSSES, MOVES, TERMINAL, TrialState, sources
from db.repositories import ClaimLost, EventRepository, SweepRepository, TrialRepository
from db.repositories.trials import Claim
from db.session import Database
from tests.db.test_trials import make_sweep
from tests.postgres import drop_database, new_database

# a lease that has run out before it begins stands for a worker that died
LEASES = st.sampled_from([60.0, -1.0])
PICK = st.integers(0, 1000)


class TrialLife(RuleBasedStateMachine):
    """Workers that claim, report late, die and come back; a reaper; a user who cancels."""

    database: Database

    def __init__(self) -> None:
        super().__init__()
        self.sweep_id = make_sweep(self.database, 2)
        self.claims: list[Claim] = []
        self.released: dict[str, int] = {}
        self.ended: dict[str, tuple[Any, ...]] = {}

    def teardown(self) -> None:
        with self.database.session() as session:
            SweepRepository(session).cancel(self.sweep_id)

    @rule(lease_s=LEASES)
    def claim(self, lease_s: float) -> None:
        with self.database.session() as session:
            held = TrialRepository(session).claim("w", lease_s=lease_s, sweep_ids=[self.sweep_id])
        if held is not None:
            self.claims.append(held)

    @precondition(lambda self: self.claims)
    @rule(pick=PICK, lease_s=LEASES)
    def heartbeat(self, pick: int, lease_s: float) -> None:
        with self.database.session() as session:
            TrialRepository(session).heartbeat(self._pick(pick).claim_id, lease_s=lease_s)

    @precondition(lambda self: self.claims)
    @rule(pick=PICK)
    def start(self, pick: int) -> None:
        self._report(pick, None)

    @precondition(lambda self: self.claims)
    @rule(pick=PICK, state=st.sampled_from(sorted(TERMINAL)))
    def report(self, pick: int, state: TrialState) -> None:
        self._report(pick, state)

    @precondition(lambda self: self.claims)
    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        held = self._pick(pick)
        with self.database.session() as session:
            if TrialRepository(session).release(held, "told to stop"):
                self.released[held.trial.id] = self.released.get(held.trial.id, 0) + 1

    @rule()
    def reap(self) -> None:
        with self.database.session() as session:
            TrialRepository(session).reap()

    @rule(number=st.integers(0, 1))
    def cancel(self, number: int) -> None:
        with self.database.session() as session:
            trials = TrialRepository(session)
            trials.cancel(trials.of_sweep(self.sweep_id)[number].id)

    @invariant()
    def rules_hold(self) -> None:
        with self.database.reading() as session:
            trials = TrialRepository(session)
            for trial in trials.of_sweep(self.sweep_id):
                attempts = trials.attempts(trial.id)
                live = [a for a in attempts if a.finished_at is None]
                state = TrialState(trial.state)
                assert len(live) == (1 if state in LIVE else 0)
                assert state is not TrialState.LOST
                assert [a.number for a in attempts] == list(range(len(attempts)))
                assert len(attempts) <= MAX_LOSSES + 1 + self.released.get(trial.id, 0)
                answer = (state, trial.reason, trial.finished_at, trial.result_json, len(attempts))
                if trial.id in self.ended:
                    assert answer == self.ended[trial.id]
                elif state in TERMINAL:
                    assert trial.finished_at is not None
                    self.ended[trial.id] = answer
            for trial_id, path in self._paths(EventRepository(session)).items():
                for before, after in zip(["queued", *path], path, strict=False):
                    assert after in MOVES[TrialState(before)], (trial_id, path)

    def _paths(self, events: EventRepository) -> dict[str, list[str]]:
        paths: dict[str, list[str]] = {}
        for event in events.after(sweep_id=self.sweep_id, limit=10_000):
            if event.trial_id is not None:
                paths.setdefault(event.trial_id, []).append(event.kind.removeprefix("trial."))
        return paths

    def _pick(self, pick: int) -> Claim:
        return self.claims[pick % len(self.claims)]

    def _report(self, pick: int, state: TrialState | None) -> None:
        held = self._pick(pick)
        try:
            with self.database.session() as session:
                trials = TrialRepository(session)
                if state is None:
                    trials.start(held)
                else:
                    trials.finish(held, state, reason="so it was")
        except ClaimLost:
            return


def _run(url: str, examples: int) -> None:
    database = Database(url)
    database.migrate()
    machine = type("TrialLifeOf", (TrialLife,), {"database": database})
    budget = settings(
        max_examples=examples,
        stateful_step_count=25,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    run_state_machine_as_test(machine, settings=budget)
    database.close()


def test_life_of_a_trial_on_sqlite() -> None:
    with tempfile.TemporaryDirectory() as folder:
        _run(f"sqlite:///{Path(folder) / 'life.db'}", 20)


@pytest.mark.postgres
def test_life_of_a_trial_on_postgresql() -> None:
    url = new_database()
    _run(url, 8)
    drop_database(url)


def test_terminal_states_have_no_way_out_and_all_states_are_in_the_table() -> None:
    assert set(MOVES) == set(TrialState)
    assert all(not MOVES[state] for state in TERMINAL)
    assert sources(TrialState.PLACING) == {TrialState.QUEUED}
    assert sources(TrialState.QUEUED) == {TrialState.LOST}
