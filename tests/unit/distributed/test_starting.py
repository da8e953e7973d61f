"""The command that starts a script as several ranks, and what torchrun says of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from advisor.core.errors import AdvisorError
from advisor.distributed import place, starting
from advisor.profiling.beside.command import ScriptCommand
from advisor.trials.script import last_line

TOLD = """
Failures:
[1]:
  time      : 2026-11-27_03:11:03
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 23594)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-27_03:11:03
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 23593)
  traceback : Signal 9 (SIGKILL) received by PID 23593
"""


def test_torchrun_stands_in_the_interpreters_place_and_the_words_stay(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    plain = ScriptCommand.parse((str(script), "--lr", "0.1"))
    found = starting.on_ranks(plain, 3, tmp_path, seed=7, way=place.RankWay(norms=place.LOCAL))
    assert found.started[1:] == (
        "-m",
        "advisor.distributed.agent",
        "--standalone",
        "--nproc-per-node",
        "3",
        str(script),
        "--lr",
        "0.1",
    )
    assert found.words == plain.words
    variables = dict(found.variables)
    assert (variables[place.RANKS_VARIABLE], variables[place.NORMS_VARIABLE]) == ("3", "local")
    assert dict(starting.one_of(plain, 3).variables) == {place.SHARE_VARIABLE: "3"}
    with pytest.raises(AdvisorError, match="a command of its own"):
        starting.on_ranks(ScriptCommand(argv=("torchrun",), name="torchrun", literal=True), 2, tmp_path, seed=0)


def test_the_rank_that_ended_first_is_named() -> None:
    assert starting.dead_rank(TOLD) == "rank 1 was ended by SIGKILL"
    assert starting.dead_rank("all is well") == ""
    spawned = "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal SIGKILL"
    assert starting.dead_rank(spawned) == "rank 1 was ended by SIGKILL"
    raised = """torch.multiprocessing.spawn.ProcessRaisedException:

-- Process 2 terminated with the following error:
Traceback (most recent call last):
  File "train.py", line 3, in main
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.
"""
    assert starting.dead_rank(raised) == "rank 2: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB."


@pytest.mark.parametrize(("visible", "seen"), [(None, "0"), ("2,3", "2"), ("", "")])
def test_one_process_as_a_reference_sees_one_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str | None, seen: str
) -> None:
    """A script with nn.DataParallel would take them all."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    (tmp_path / "train.py").touch()
    command = starting.on_one_gpu(ScriptCommand.parse((str(tmp_path / "train.py"),)))
    assert dict(command.variables)["CUDA_VISIBLE_DEVICES"] == seen


def test_each_rank_sees_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for visible, expected in (("", "1"), ("4,6", "6"), ("3", "")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        place.see_one_gpu(1)
        assert place.os.environ["CUDA_VISIBLE_DEVICES"] == expected


TAKEN = """[W1127 socket.cpp:245] The server socket has failed to bind to 0.0.0.0:29500 (errno: 98 - Address already in use).
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    torch.distributed.init_process_group("gloo")
torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, EADDRINUSE
Exception raised from makeWithPort at TCPStore.cpp:1234 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation) + 0x80 (0x7f8 in libc10.so)
"""
REFUSED = """[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 9, in <module>
[rank1]:     net = DistributedDataParallel(net)
[rank1]: torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3384, unhandled system error, NCCL version 2.27.5
[rank1]: ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
[rank1]: Last error:
[rank1]: Error while creating shared memory segment
"""


@pytest.mark.parametrize(
    ("output", "told"),
    [
        (TAKEN, "torch.distributed.DistNetworkError: The server socket"),
        (REFUSED, "torch.distributed.DistBackendError: NCCL error"),
    ],
    ids=["port taken", "NCCL refused"],
)
def test_why_ranks_could_not_meet_is_one_line(tmp_path: Path, output: str, told: str) -> None:
    path = tmp_path / "script-output.log"
    path.write_text(output)
    assert last_line(path).startswith(told)
