"""Groups of real processes: exchanges, and ways out when a member dies or stands still."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
from rank_processes import Member, ranks, run_ranks

from nobiru.errors import GroupError
from nobiru.parallel.groups import Group, break_connections_to, connect_store, form_group

SOON_S = 8.0  # far from the limits of 20 s and more at which a call would end anyway, also on loaded machines


def gather(member: Member) -> list[list[int]]:
    group = member.group()
    assert (group.rank, group.size) == (member.rank, member.size)
    return group.all_gather_record(torch.tensor([member.rank, 7, -(2**40)])).tolist()


@pytest.mark.parametrize("size", [1, 3])
def test_all_gather_record(size: int) -> None:
    expected = [[rank, 7, -(2**40)] for rank in range(size)]
    assert run_ranks(gather, size) == [expected] * size


def exchange(member: Member, dtype: torch.dtype) -> None:
    """Rank r sends (r + 2 s) % 4 rows to rank s, each telling where it comes from and its number."""
    group = member.group()
    num_sent = [(member.rank + 2 * to) % 4 for to in range(member.size)]
    num_received = [(sender + 2 * member.rank) % 4 for sender in range(member.size)]
    rows = torch.tensor([[member.rank, to, n] for to, num in enumerate(num_sent) for n in range(num)], dtype=dtype)
    received = group.all_to_all(rows.reshape(-1, 3), num_sent, num_received)
    assert received.dtype == dtype
    expected = [[sender, member.rank, n] for sender, num in enumerate(num_received) for n in range(num)]
    assert received.tolist() == expected
    nothing = [0] * member.size
    assert group.all_to_all(rows.reshape(-1, 3)[:0], nothing, nothing).shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("size", [1, 4])
def test_all_to_all(size: int, dtype: torch.dtype) -> None:
    run_ranks(exchange, size, dtype)


def hand_over(member: Member) -> None:
    group = member.group(interface="lo")
    tensor = torch.full((5,), member.rank, dtype=torch.uint8)
    group.broadcast(tensor, 1)
    assert tensor.tolist() == [1] * 5
    if member.rank == 0:
        group.send(torch.arange(4, dtype=torch.bfloat16), 2, tag=3)
    if member.rank == 2:
        received = torch.zeros(4, dtype=torch.bfloat16)
        group.receive(received, 0, tag=3)
        assert received.tolist() == [0, 1, 2, 3]


def test_broadcast_send_and_receive() -> None:
    run_ranks(hand_over, 3)


def several_groups(member: Member) -> list[int]:
    """Two groups over the same store; one is destroyed, the other works on."""
    first, second = member.group("first"), member.group("second")
    first.destroy()
    assert first.is_broken
    with pytest.raises(GroupError, match="all-gather in group a1/first: the group is broken"):
        first.all_gather_record(torch.tensor([0]))
    return second.all_gather_record(torch.tensor([member.rank])).flatten().tolist()


def test_groups_are_independent() -> None:
    assert run_ranks(several_groups, 2) == [[0, 1]] * 2


def gather_forever(group: Group) -> None:
    while True:
        group.all_gather_record(torch.tensor([1]))
        time.sleep(0.001)


def gather_until_it_fails(member: Member, timeout_s: float, destroys: bool) -> float:
    """Says when the first round went well; when (time on this machine) the error came."""
    group = member.group(timeout_s=timeout_s)
    group.all_gather_record(torch.tensor([1]))
    member.say("works")
    with pytest.raises(GroupError):
        gather_forever(group)
    raised = time.monotonic()
    if destroys:
        group.destroy()
    return raised


def test_a_death_frees_all_members_once_groups_are_destroyed() -> None:
    with ranks(gather_until_it_fails, 4, 30.0, True) as running:
        for rank in range(4):
            running.hear(rank)
        killed = time.monotonic()
        os.kill(running.pid(1), signal.SIGKILL)
        for rank in (0, 2, 3):
            assert running.hear(rank) - killed < SOON_S


def gather_with_control(member: Member) -> float:
    """As above; a control thread breaks the connections when the test says so. Seconds until the call was out."""
    group = member.group(timeout_s=50.0)
    broken_at = []

    def control() -> None:
        member.wait_for_the_test()
        broken_at.append(time.monotonic())
        group.break_connections()

    thread = threading.Thread(target=control)
    thread.start()
    member.say("formed")
    with pytest.raises(GroupError):
        gather_forever(group)
    raised = time.monotonic()
    thread.join()
    group.destroy()
    return raised - broken_at[0]


def test_a_control_thread_gets_a_member_out_that_waits_for_a_stopped_one() -> None:
    with ranks(gather_with_control, 3) as running:
        for rank in range(3):
            running.hear(rank)
        os.kill(running.pid(1), signal.SIGSTOP)
        time.sleep(0.3)
        for rank in (0, 2):
            running.tell(rank)
        for rank in (0, 2):
            assert 0 <= running.hear(rank) < SOON_S
        os.kill(running.pid(1), signal.SIGCONT)


def test_waiting_for_a_stopped_member_ends_with_the_time_limit() -> None:
    with ranks(gather_until_it_fails, 2, 2.0, False) as running:
        for rank in range(2):
            running.hear(rank)
        os.kill(running.pid(0), signal.SIGSTOP)
        stopped = time.monotonic()
        assert 0.5 < running.hear(1) - stopped < SOON_S
        os.kill(running.pid(0), signal.SIGCONT)


def survive(member: Member) -> list[int]:
    """Rank 1 dies in the first group; the others form the next one over the same store."""
    group = member.group()
    if member.rank == 1:
        os._exit(1)
    with pytest.raises(GroupError):
        gather_forever(group)
    group.destroy()
    position = {0: 0, 2: 1}[member.rank]
    again = form_group(member.store(), attempt_id="a2", name="test", rank=position, size=2, timeout_s=10.0)
    return again.all_gather_record(torch.tensor([member.rank])).flatten().tolist()


def test_survivors_form_a_new_group() -> None:
    with ranks(survive, 3) as running:
        assert running.hear(0) == running.hear(2) == [0, 2]


def form_alone(member: Member) -> float:
    store = connect_store("127.0.0.1", member.port, timeout_s=1.0)
    began = time.monotonic()
    with pytest.raises(GroupError, match=r"of 2 ranks did not form within 1.0 s"):
        form_group(store, attempt_id="a1", name="test", rank=0, size=2, timeout_s=30.0)
    return time.monotonic() - began


def test_a_member_that_does_not_come() -> None:
    assert run_ranks(form_alone, 1)[0] < SOON_S


def test_no_store() -> None:
    with pytest.raises(GroupError, match=r"no store answered at .*:1 within"):
        connect_store("127.0.0.1", 1, timeout_s=0.3)


def open_and_close(member: Member) -> tuple[int, int]:
    """Descriptors and threads after one group, and after five more that were destroyed."""
    counts = []
    for number in range(6):
        group = member.group(f"group-{number}")
        group.all_gather_record(torch.tensor([1]))
        group.destroy()
        del group
        if number in (0, 5):
            end = time.monotonic() + 5
            while True:
                count = (len(os.listdir("/dev/fd")), len(os.listdir("/proc/self/task")))
                if number == 0 or count <= counts[0] or time.monotonic() > end:
                    break
                time.sleep(0.05)
            counts.append(count)
    return counts[0], counts[1]


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="counts threads as Linux shows them")
def test_nothing_is_left_of_destroyed_groups() -> None:
    for first, last in run_ranks(open_and_close, 2):
        assert last <= first


def wait_for_nobody(member: Member) -> float:
    """The other member of the group never comes, and another thread knows that."""
    store = connect_store("127.0.0.1", member.port, timeout_s=20.0)
    threading.Timer(0.5, break_connections_to, [member.port]).start()
    began_s = time.monotonic()
    with pytest.raises(GroupError, match="did not form"):
        form_group(store, attempt_id="a1", name="alone", rank=0, size=2, timeout_s=20.0)
    return time.monotonic() - began_s


def test_waiting_for_others_can_be_ended() -> None:
    (waited_s,) = run_ranks(wait_for_nobody, 1)
    assert 0.4 < waited_s < SOON_S
