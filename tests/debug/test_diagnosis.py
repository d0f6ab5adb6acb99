"""The sentence that names the cause of a hang, from reports of ranks that are made by hand."""

from __future__ import annotations

from vescale.debug._locations import Place
from vescale.debug._stopped_ranks import ProcessIdentity
from vescale.debug._watchdog import RankReport, StartedCollective, diagnose


def message(op: str, peer: int, seconds: float) -> StartedCollective:
    return StartedCollective(op, 3, "pp", (0, 1, 2), "pp", 8, "a stage", seconds, peer)


def report(rank: int, module: str | None, *running: StartedCollective) -> RankReport:
    return RankReport(rank, ProcessIdentity.own(), running=running, place=Place(module, "forward", "train.py:3"))


def test_a_send_that_nobody_has_waited_for_is_not_the_cause() -> None:
    """On gloo, a send that has arrived runs until it is waited for; here it is the oldest message of the job."""
    reports = [
        report(0, None, message("recv", 1, 3.1)),
        report(1, "blocks.1", message("send", 2, 3.3)),
        report(2, None, message("send", 1, 3.2), message("recv", 1, 3.1)),
    ]
    sentence = diagnose({each.rank: each for each in reports})
    assert sentence.startswith("rank 0 has waited for rank 1 for 3.1 s, in a recv over axis 'pp'"), sentence
    assert "rank 1 is at train.py:3 in forward of blocks.1" in sentence, sentence
