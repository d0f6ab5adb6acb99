"""What a reducer has sent for its buckets, beside what tells the reducers of other cases in this process apart."""

from __future__ import annotations

from vescale.comm import CommRecord, Ledger


def of_buckets(ledger: Ledger) -> list[CommRecord]:
    return [record for record in ledger.records if record.requester.startswith("bucket")]
