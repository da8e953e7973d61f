"""How long a fresh run is timed, by planted steps."""

from types import SimpleNamespace

import pytest
import torch

from advisor.core import storage
from advisor.loop.session import Session
from advisor.loop.stop import StopTraining
from advisor.loop.training import Draw, StepEvent, Training
from advisor.trials import measure, records

STEP_MS = 100.0


@pytest.fixture(autouse=True)
def ends(monkeypatch):
    """What ends a script would end the tests' own process."""

    def stop(session, reason):
        raise StopTraining(reason)

    monkeypatch.setattr(measure, "stop", stop)
    monkeypatch.setattr(measure.atexit, "register", lambda function: None)


def measured(tmp_path, *, workers, wait_ms, warmup=3, steps=6):
    """A script whose loader has so many workers and keeps each step waiting for so long."""
    training = Training(device=torch.device("cpu"), loaders=[SimpleNamespace(num_workers=workers)])
    driver = measure.MeasureDriver(
        training, Session(mode="measure", run_dir=str(tmp_path), script="train.py", warmup=warmup, steps=steps)
    )

    def train():
        for index in range(1000):
            now = int(index * STEP_MS * 1e6)
            draw = Draw((None, now - int(wait_ms * 1e6)), (None, now))
            driver.on_step(
                StepEvent(index=index, host_ns=now, event=None, clean=True, draws=(draw,), cpu_ns=1 + int(now * 0.3))
            )

    with pytest.raises(StopTraining):
        train()
    return storage.load(tmp_path / records.MEASURE_FILE, records.Measurement)


def test_a_loop_that_waits_for_its_workers_is_timed_for_whole_turns_of_them(tmp_path):
    found = measured(tmp_path, workers=4, wait_ms=60.0)
    assert found.workers == 4
    assert len(found.every_us) == 4 * measure.TURNS
    assert found.waited_us == pytest.approx([60_000.0] * 20)
    assert found.cpu_us == pytest.approx([30_000.0] * 20)


@pytest.mark.parametrize(("workers", "wait_ms"), [(4, 5.0), (0, 60.0)])
def test_one_that_does_not_wait_is_timed_for_the_steps_ordered(tmp_path, workers, wait_ms):
    assert len(measured(tmp_path, workers=workers, wait_ms=wait_ms).every_us) == 6


def test_no_turn_of_many_workers_is_waited_for_for_ever(tmp_path):
    found = measured(tmp_path, workers=64, wait_ms=60.0)
    assert sum(found.every_us) == pytest.approx(measure.TURNS_S * 1e6)
