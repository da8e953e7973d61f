import json

from advisor.core import storage
from advisor.core.plan import PlanItem
from advisor.core.verdict import OPEN, STATUSES, UNTRIED, Status


def test_a_status_is_its_word_wherever_it_is_written() -> None:
    status = Status.NOT_APPLICABLE
    assert f"{status}|{status:>15}|%s" % status == "not applicable| not applicable|not applicable"
    assert json.dumps({"status": status}) == '{"status": "not applicable"}'
    assert storage.to_plain(PlanItem(transform="tf32", status=status))["status"] == "not applicable"


def test_a_word_read_from_a_file_is_a_status() -> None:
    read = storage.from_plain(PlanItem, {"transform": "tf32", "status": "kept"})
    assert read.status is Status.KEPT
    assert "kept" in {Status.KEPT}  # hashes as its word


def test_no_file_has_what_is_no_outcome() -> None:
    assert set(STATUSES) == set(Status) - {Status.MORE}
    assert set(STATUSES) >= OPEN | UNTRIED
