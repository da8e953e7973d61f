"""A profile with kept changes on shows the loop as they have made it, not as it was written."""

import pytest
from searched_loop import Wrapped, find, train

from advisor.core import storage
from advisor.core.environment import Environment
from advisor.core.plan import PlanItem
from advisor.core.transform_table import ROWS
from advisor.loop.attach import Attached
from advisor.loop.records import FACTS_FILE, STEPS_FILE, FactsRecord, StepsRecord
from advisor.loop.session import Session
from advisor.profiling.after.assemble import assemble
from advisor.transforms import capture, registry
from advisor.trials.profile import KeptProfileDriver

pytestmark = pytest.mark.usefixtures("bf16_everywhere")


class Captured(Wrapped):
    """A forward captured by Dynamo, as bundled kernels have it."""

    id = "captured"

    def apply(self, training, parameters):
        return capture.set_family([training.roots[0].module], "batchnorm_act")


def either(name):
    if name == "captured":
        return Captured()
    return registry.get(name) if ROWS[name].code else find(name)


def begin(training, session, watcher, found):
    KeptProfileDriver(training, session, watcher, Attached.discovery, found).attach()


def profiled(folder, *kept):
    orders = Session(
        mode="profile",
        run_dir=str(folder),
        script="train.py",
        warmup=4,
        steps=4,
        detail_steps=1,
        counters=False,
        kept=tuple(PlanItem(transform=name, status="kept") for name in kept),
    )
    storage.save(folder / "session.json", orders)
    done, reason = train(orders, begin, either, steps=200)
    assert (reason, done < 60) == ("measured", True)
    return storage.load(folder / FACTS_FILE, FactsRecord).model, storage.load(folder / STEPS_FILE, StepsRecord)


def test_precision_and_layout_are_those_of_the_changed_loop(tmp_path):
    facts, steps = profiled(tmp_path, "channels_last", "amp_bf16")
    assert (facts.channels_last, facts.autocast) == (True, "bf16")
    assert steps.complete
    rows = assemble(tmp_path, Environment(device="cpu")).kernels
    assert "bf16" in {row.dtype for row in rows if row.kind == "conv" and row.phase == "forward"}


def test_what_cannot_go_on_is_said(tmp_path):
    facts, steps = profiled(tmp_path, "does_not_apply", "amp_bf16")
    assert (facts.channels_last, facts.autocast) == (False, "bf16")
    assert any("profiled without does_not_apply" in note and "no such layer" in note for note in steps.notes)


def test_a_captured_forward_is_not_looked_into(tmp_path):
    facts, steps = profiled(tmp_path, "channels_last", "amp_bf16", "captured")
    assert (facts.channels_last, facts.autocast) == (True, "bf16")
    assert facts.recompiles == 0  # a look would make Dynamo compile with it and without
    assert [fact.input_shape for fact in facts.convs] == [()]
    assert steps.complete
