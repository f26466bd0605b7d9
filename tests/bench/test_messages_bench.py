"""The report on messages: its record has every row, and what is counted agrees with the passes."""


import messages
from helpers import results

RECORD = results("messages")


def test_the_record_has_every_row_and_nothing_got_worse():
    assert {row["network"] for row in RECORD["only_new"]} == {*messages.JOINING}
    for row in RECORD["only_new"]:
        assert all(row["after"][way] <= row["before"][way] for way in ("forward", "backward"))
    for what, (_, policies) in messages.CHOICES.items():
        assert [(row["scheduler"], row["ranks"]) for row in RECORD[what]] == [(p, n) for p in policies for n in (2, 4)]
    for row in RECORD["fill"]:
        first, *others = row["arms"].values()
        assert all(arm["predicted_waits"] <= first["predicted_waits"] for arm in others)


def test_steps_are_predicted_again_as_in_the_record():
    again = messages.arms("fill", "one_f_one_b", 2, 0)
    wanted = next(row for row in RECORD["fill"] if (row["scheduler"], row["ranks"]) == ("one_f_one_b", 2))["arms"]
    assert {name: arm["predicted_ms"] for name, arm in again.items()} == {
        name: arm["predicted_ms"] for name, arm in wanted.items()}
