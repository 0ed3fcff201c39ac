"""The row of credentials by which one init is known."""

from __future__ import annotations

import pytest

from openforgerl.sandboxes.credentials import Credentials

KEY = b"k" * 32


def of_pod(first: int = 0) -> Credentials:
    return Credentials(KEY, "p", "1", first=first)


def test_each_is_of_one_key_one_sandbox_one_making_and_one_number() -> None:
    rows = [of_pod(), Credentials(KEY, "p", "2"), Credentials(KEY, "q", "1"), Credentials(b"", "p", "1")]
    made = [row.token(number) for row in rows for number in (0, 1)]
    assert len(set(made)) == 8
    for row in rows:
        own = {row.token(0), row.token(1)}
        assert {token for token in made if Credentials.admits(row, token)} == own


def test_the_one_before_is_good_until_the_next_is_taken_or_used() -> None:
    row = of_pod()
    assert row.admits(row.token(0)) and row.admits(row.token(0))  # its connection broke at once
    number, token = row.following()
    assert (number, token) == (1, row.token(1))
    assert row.admits(row.token(0))  # broke before init had the next
    row.taken(number)
    assert not row.admits(row.token(0))
    assert row.admits(token) and row.following()[0] == 2
    assert row.admits(row.token(2))  # got it, and nobody heard that it did
    assert not row.admits(token)
    row.taken(1)  # late news changes nothing
    assert not row.admits(token) and row.following()[0] == 3


def test_whoever_comes_after_a_restart_has_had_the_second() -> None:
    assert not of_pod(1).admits(of_pod().token(0))
    assert of_pod(1).admits(of_pod().token(1))
    later = of_pod(1)
    assert later.admits(of_pod().token(17)) and not later.admits(of_pod().token(16))


def test_what_was_dead_before_stays_dead_for_whoever_goes_on() -> None:
    before, after = of_pod(1), of_pod(1)
    assert before.admits(before.token(5))
    assert after.continues(before) and not after.admits(after.token(4))
    assert not after.continues(Credentials(KEY, "p", "2"))


@pytest.mark.parametrize("said", ["", "0", "x.y", "-1.", "00", "0x", " 0.", "1e3", "٣"])
def test_what_is_no_credential_is_refused(said: str) -> None:
    mac = of_pod().token(0).split(".")[1]
    assert not of_pod().admits(said) and not of_pod().admits(said + mac) and not of_pod().admits(said + "." + mac[:-1])
    assert not of_pod().admits("9" * 5000 + "." + mac)
