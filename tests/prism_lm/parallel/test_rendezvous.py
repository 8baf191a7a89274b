"""Ranks that do not all come: who is missing is said once, within the time, and nobody waits for ever."""

import os
import re
import socket
import time
from collections import Counter

import pytest

from prism_lm.parallel.mesh import Ranks, process_group
from prism_lm.parallel.rendezvous import Unmet, describe_missing_nodes, read_limit_s, spell_ranges
from prism_lm.parallel.store import open_store
from tests.harness import find_free_port, read_ranks, run_on

pytestmark = pytest.mark.alone

LIMIT_S = 2.0


def meet(absent: list[int], **variables: str) -> tuple[str, bool, float]:
    """Words of the refusal, whether this rank says them, and the seconds it took; the absent ranks do not come."""
    os.environ |= {"PRISM_RENDEZVOUS_S": f"{LIMIT_S:g}", **variables}
    ranks = read_ranks()
    if ranks.rank in absent:
        time.sleep(LIMIT_S + 3.0)
        return "absent", False, 0.0
    began_s = time.monotonic()
    try:
        open_store(ranks, purpose="group")
    except Unmet as error:
        return str(error), error.is_said_here, time.monotonic() - began_s
    return "met", False, time.monotonic() - began_s


def meet_on_nodes(absent: list[int]) -> tuple[str, bool, float]:
    """As above, two ranks on each of three nodes."""
    nodes = ["node7", "node8", "node9"]
    expected = ",".join(f"{node}:2" for node in nodes)
    return meet(absent, SLURMD_NODENAME=nodes[read_ranks().rank // 2], PRISM_NODES=expected)


def test_missing_nodes_and_ranks_are_named_with_one_text_on_every_rank_that_came() -> None:
    answers = run_on(6, meet_on_nodes, [2, 3, 5])
    texts = {answers[rank][0] for rank in (0, 1, 4)}
    assert len(texts) == 1
    text = texts.pop()
    assert "3 did not come: node8 (0 of 2 ranks came), node9 (1 of 2 ranks came), ranks 2-3, 5;" in text
    assert "node7" not in text and f"PRISM_RENDEZVOUS_S={LIMIT_S:g}" in text and "MASTER_ADDR=127.0.0.1" in text
    assert not any(is_said for _, is_said, _ in answers), "rank 0 says it, as it says what all ranks find"
    assert answers[0][2] > LIMIT_S - 0.5 and all(answers[rank][2] < LIMIT_S + 8 for rank in (0, 1, 4)), answers


def test_rank_0_that_never_comes_is_named_with_its_address_by_the_others() -> None:
    answers = run_on(3, meet, [0])[1:]
    for rank, (text, is_said, seconds) in enumerate(answers, start=1):
        assert re.search(rf"MASTER_ADDR=127\.0\.0\.1 MASTER_PORT=\d+ must be reached by rank {rank} on ", text)
        assert is_said and seconds < LIMIT_S + 8


def meet_at_an_agent(absent: list[int]) -> tuple[str, bool, float]:
    """A store that is up before the ranks are, as torchrun's is; rank 0's process keeps it."""
    from torch.distributed import TCPStore

    port = int(os.environ["MASTER_PORT"])
    kept = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) if read_ranks().is_main else None
    answer = meet(absent, TORCHELASTIC_USE_AGENT_STORE="True")
    del kept
    return answer


def test_one_of_the_waiting_ranks_says_that_rank_0_did_not_come_where_a_store_is_up_without_it() -> None:
    answers = run_on(3, meet_at_an_agent, [0])[1:]
    assert all(text.startswith("rank 0 must come to MASTER_ADDR=127.0.0.1") for text, _, _ in answers), answers
    assert sum(is_said for _, is_said, _ in answers) == 1
    assert all(seconds < LIMIT_S + 8 for _, _, seconds in answers)


def meet_late() -> tuple[str, bool, float]:
    time.sleep(0.6 * LIMIT_S * read_ranks().rank)
    return meet([])


def test_late_ranks_are_waited_for_within_the_time() -> None:
    assert [text for text, _, _ in run_on(2, meet_late)] == ["met", "met"]


def open_one_alone() -> float:
    """Rank 0 opens a second store while rank 1 does not."""
    open_store(read_ranks(), purpose="presence")
    began_s = time.monotonic()
    if read_ranks().is_main:
        open_store(read_ranks(), purpose="group")
    else:
        time.sleep(LIMIT_S)
    return time.monotonic() - began_s


def test_ranks_meet_once_for_all_purposes() -> None:
    assert run_on(2, open_one_alone)[0] < 1.0


def count_differently() -> str:
    os.environ |= {"PRISM_RENDEZVOUS_S": "20", "SLURMD_NODENAME": f"node{read_ranks().rank}"}
    ranks = read_ranks() if read_ranks().is_main else Ranks(rank=read_ranks().rank, world_size=3)
    with pytest.raises(Unmet) as caught:
        open_store(ranks, purpose="group")
    return str(caught.value)


def test_nodes_that_count_the_ranks_differently_are_named_at_once() -> None:
    began_s = time.monotonic()
    texts = run_on(2, count_differently)
    assert texts[0] == texts[1]
    assert texts[0].startswith("WORLD_SIZE=3 on node1 must be WORLD_SIZE=2 as on node0; start the same number")
    assert time.monotonic() - began_s < 19


def meet_in_two_jobs() -> str:
    """Ranks 0 and 1 share an address by chance; each is of a job of its own."""
    rank = read_ranks().rank
    os.environ |= {"PRISM_RENDEZVOUS_S": f"{LIMIT_S:g}", "SLURM_JOB_ID": str(100 + rank)}
    with pytest.raises(Unmet) as caught:
        open_store(read_ranks(), purpose="group")
    return str(caught.value)


def test_jobs_that_share_a_port_by_chance_do_not_join_one_another() -> None:
    first, second = run_on(2, meet_in_two_jobs)
    assert "1 did not come: rank 1;" in first
    assert second.startswith("rank 0 must come to ") or "lost rank 0" in second


def test_port_that_another_process_holds_is_named_at_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    port = find_free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    with socket.socket() as taken:
        taken.bind(("", port))
        taken.listen()
        with pytest.raises(Unmet, match=rf"MASTER_PORT={port} must be free on .*export another MASTER_PORT"):
            open_store(Ranks(world_size=2), purpose="group")


def test_listener_that_is_no_store_is_given_up_within_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(silent.getsockname()[1]))
        monkeypatch.setenv("PRISM_RENDEZVOUS_S", "2")
        began_s = time.monotonic()
        with pytest.raises(Unmet, match=r"must be reached by rank 1 .*PRISM_RENDEZVOUS_S=2"):
            open_store(Ranks(rank=1, world_size=2), purpose="group")
        assert time.monotonic() - began_s < 10


@pytest.mark.parametrize("text", ["0", "-1", "soon", "inf", "nan"])
def test_time_that_is_no_positive_number_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRISM_RENDEZVOUS_S", text)
    with pytest.raises(ValueError, match=rf"PRISM_RENDEZVOUS_S={text} must be a positive number of seconds"):
        read_limit_s()


def test_one_process_waits_for_nobody_whatever_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRISM_RENDEZVOUS_S", "0.001")
    with process_group(Ranks()):
        pass


def test_numbers_are_spelled_as_ranges_and_complete_nodes_are_left_out() -> None:
    assert spell_ranges([0, 2, 3, 4, 7]) == "0, 2-4, 7" and spell_ranges([]) == ""
    present = Counter({"a": 2, "b": 1})
    assert describe_missing_nodes("a:2,b:2,c:1", present) == ["b (1 of 2 ranks came)", "c (0 of 1 ranks came)"]
    assert describe_missing_nodes("", present) == []
