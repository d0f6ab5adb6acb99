"""What is found in records of ranks: mismatches, deadlocks, ranks that never come; and what is not."""

from __future__ import annotations

from vescale.simulation import Collective, RankRecord
from vescale.simulation._simulate import Finding, find
from vescale.simulation._tracer import Ending

WORLD = [0, 1]


def op(
    name: str, *, ranks: list[int] = WORLD, group: str = "0", peer: int | None = None, num_bytes: int = 4
) -> Collective:
    return Collective(name, group, ranks, "", num_bytes, f"train.py:{name}", peer, {"bytes": num_bytes})


def blocking(rank: int, *ops: Collective, ending: Ending | None = None) -> RankRecord:
    order = [step for n in range(len(ops)) for step in (n, ~n)]
    return RankRecord(rank, list(ops), order, ending=ending or Ending())


def found(*records: RankRecord) -> list[Finding]:
    return find({record.rank: record for record in records})


def test_equal_ranks_have_no_findings() -> None:
    ops = [op("all_reduce"), op("all_gather"), op("barrier")]
    assert found(blocking(0, *ops), blocking(1, *ops)) == []


def test_ranks_that_were_not_simulated_always_come() -> None:
    everyone = [0, 1, 2, 3]
    assert found(blocking(0, op("all_reduce", ranks=everyone), op("send", ranks=everyone, peer=3))) == []


def test_other_collectives_are_a_mismatch() -> None:
    (one,) = found(blocking(0, op("all_reduce"), op("barrier")), blocking(1, op("barrier"), op("all_reduce")))
    assert (one.kind, one.ranks, one.at) == ("mismatch", [0, 1], "train.py:all_reduce")
    assert "rank 0 calls all_reduce of ranks [0, 1]" in one.text and "rank 1 calls barrier" in one.text


def test_other_sizes_are_a_mismatch() -> None:
    (one,) = found(blocking(0, op("all_reduce")), blocking(1, op("all_reduce", num_bytes=8)))
    assert one.kind == "mismatch" and "bytes 4" in one.text and "bytes 8" in one.text


def test_other_order_of_two_groups_is_a_deadlock() -> None:
    a, b = op("all_reduce", group="a"), op("all_gather", group="b")
    (one,) = found(blocking(0, a, b), blocking(1, b, a))
    assert (one.kind, one.ranks) == ("deadlock", [0, 1])
    assert "rank 0 waits in all_reduce" in one.text and "rank 1 waits in all_gather" in one.text


def test_asynchronous_collectives_may_start_in_another_order_of_groups() -> None:
    a, b = op("all_reduce", group="a"), op("all_gather", group="b")
    first, second = RankRecord(0, [a, b], [0, 1, ~0, ~1]), RankRecord(1, [b, a], [0, 1, ~0, ~1])
    assert found(first, second) == []


def test_two_ranks_that_both_send_first() -> None:
    first = blocking(0, op("send", peer=1), op("recv", peer=1))
    second = blocking(1, op("send", peer=0), op("recv", peer=0))
    (one,) = found(first, second)
    assert one.kind == "deadlock" and "send to rank 1" in one.text
    assert found(first, blocking(1, op("recv", peer=0), op("send", peer=0))) == []


def test_a_circle_of_three_is_one_finding() -> None:
    pairs = [[0, 1], [1, 2], [0, 2]]
    a, b, c = (op("all_reduce", ranks=ranks, group=str(ranks)) for ranks in pairs)
    (one,) = found(blocking(0, a, c), blocking(1, b, a), blocking(2, c, b))
    assert (one.kind, one.ranks) == ("deadlock", [0, 1, 2])


def test_a_rank_that_ends_never_comes() -> None:
    everyone = [0, 1, 2]
    ops = [op("barrier", ranks=everyone), op("all_reduce", ranks=everyone)]
    (one,) = found(blocking(0, *ops), blocking(1, ops[0]), blocking(2, *ops))
    assert (one.kind, one.ranks) == ("never-comes", [0, 1, 2])
    assert "ranks [0, 2] wait forever in all_reduce" in one.text and "rank 1 ended without it" in one.text


def test_an_unanswered_message_never_comes_although_nobody_waits() -> None:
    (one,) = found(RankRecord(0, [op("send", peer=1)], [0]), RankRecord(1))
    assert one.kind == "never-comes" and "rank 1 ended without the recv" in one.text


def test_groups_made_on_some_ranks_only_are_named() -> None:
    (one,) = found(blocking(0, op("all_reduce", group="2")), blocking(1, op("all_reduce", group="1")))
    assert one.kind == "deadlock" and "call new_group() and init_device_mesh() on all ranks" in one.text
    (one,) = found(blocking(0, op("all_reduce", group="2")), RankRecord(1, [op("all_reduce", group="1")], [0]))
    assert one.kind == "deadlock" and "call new_group() and init_device_mesh() on all ranks" in one.text


def test_groups_of_equal_ranks_are_kept_apart() -> None:
    a, b = op("all_reduce", group="mesh a"), op("all_gather", group="mesh b")
    assert found(RankRecord(0, [a, b], [0, 1, ~0, ~1]), RankRecord(1, [b, a], [0, 1, ~0, ~1])) == []


def test_a_failure_is_the_cause_of_waits() -> None:
    failed = blocking(1, ending=Ending("error", "ValueError: no", "train.py:9"))
    (one,) = found(blocking(0, op("all_reduce")), failed)
    assert (one.kind, one.ranks, one.at) == ("error", [1], "train.py:9")
    assert "ValueError: no" in one.text and "rank 0 would wait for it in all_reduce" in one.text


def test_equal_failures_are_one_finding() -> None:
    (one,) = found(*(blocking(rank, ending=Ending("error", "ValueError: no", "train.py:9")) for rank in WORLD))
    assert one.ranks == WORLD


def test_a_receive_from_any_rank_takes_what_was_sent() -> None:
    everyone = [0, 1, 2]
    receives = blocking(0, op("recv", ranks=everyone), op("recv", ranks=everyone))
    senders = [blocking(rank, op("send", ranks=everyone, peer=0)) for rank in (1, 2)]
    assert found(receives, *senders) == []
    (one,) = found(receives, senders[0], blocking(2))
    assert one.kind == "never-comes" and "ended without the send" in one.text


def test_groups_are_made_by_all_their_ranks() -> None:
    """Backends connect the ranks of a group where it is made."""

    def made(ranks: list[int], group: str = "1") -> Collective:
        return Collective("new_group", group, ranks, "", 0, "train.py:new_group")

    assert found(blocking(0, made(WORLD)), blocking(1, made(WORLD))) == []
    (one,) = found(blocking(0, made(WORLD), op("all_reduce")), blocking(1, op("all_reduce")))
    assert one.kind == "deadlock" and "rank 0 waits in new_group of ranks [0, 1]" in one.text
    assert "call new_group() and init_device_mesh() on all ranks" in one.text
    (one,) = found(blocking(0, made(WORLD)), blocking(1))
    assert one.kind == "never-comes" and "ended without it; call new_group()" in one.text
    pairs = [blocking(rank, made([rank // 2 * 2, rank // 2 * 2 + 1])) for rank in range(4)]
    (one,) = found(*pairs)
    assert one.kind == "mismatch" and "rank" in one.text and "including for groups of other ranks" in one.text
    assert found(*(blocking(r, made([r // 2 * 2, r // 2 * 2 + 1], str(r // 2))) for r in range(4))) == []


def test_descriptions_that_ranks_compare() -> None:
    """Plans and programs, before the first collective."""

    def given(text: str, more: object = "digest") -> Collective:
        agreed = {"plan": [["shard a", text]], "program": more}
        return Collective("comparison", "vescale 1", WORLD, "", 0, "train.py:8", None, agreed, "parallelize(Net, plan)")

    assert found(blocking(0, given("dp")), blocking(1, given("dp"))) == []
    (one,) = found(blocking(0, given("dp")), blocking(1, given("tp")))
    assert one.kind == "mismatch" and "they differ: 'shard a' of plan is dp on rank 0 and tp on rank 1" in one.text
    (one,) = found(blocking(0, given("dp")), blocking(1, given("dp", "other")))
    assert "they differ in program" in one.text
    (one,) = found(blocking(0, given("dp")), blocking(1))
    assert one.kind == "never-comes" and "parallelize(Net, plan) of ranks [0, 1]" in one.text
    assert blocking(0, given("dp")).collectives == []


def test_ranks_compare_several_times_under_one_name() -> None:
    """A reducer compares its settings, and then its parameters: a later comparison is none of the one before."""

    def given(text: str) -> Collective:
        agreed = {"reducers": [["settings", text]]}
        return Collective("comparison", "vescale 1", [0, 1, 2], "", 0, "train.py:8", None, agreed, "making a reducer")

    records = [blocking(rank, given("op=None"), given("more parameters")) for rank in range(3)]
    assert found(*records) == []
    (one,) = found(*records[:2], blocking(2, given("op=None"), given("fewer parameters")))
    assert one.kind == "mismatch" and "is more parameters on ranks [0, 1] and fewer parameters on rank 2" in one.text
    (one,) = found(*records[:2], blocking(2, given("op=None")))
    assert one.kind == "never-comes"
