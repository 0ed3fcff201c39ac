"""What was made of items is used again for the very same objects at the beginning of a list, and for no others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from openforgerl.conversation import Beginnings


class Item:
    """Equal to every other, so that only identity tells them apart."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Item)

    def __hash__(self) -> int:
        return 0


def test_only_the_very_same_objects_count() -> None:
    first, second, third = Item(), Item(), Item()
    seen: Beginnings[Item, str] = Beginnings()
    seen.keep([first, second], ["one", "two"])
    assert seen.known([first, second, third]) == ["one", "two"]
    assert seen.known([first, third]) == ["one"]
    assert seen.known([second]) == []
    assert seen.known([]) == []


def test_a_list_that_goes_on_takes_the_place_of_its_beginning_and_the_oldest_go() -> None:
    items = [Item() for _ in range(4)]
    seen: Beginnings[Item, int] = Beginnings(held=2)
    seen.keep([items[0]], [0])
    seen.keep([items[0], items[1]], [0, 1])
    seen.keep([items[2]], [2])
    assert seen.known(items) == [0, 1]  # the first two lists are one
    seen.keep([items[3]], [3])
    assert seen.known(items) == []
    assert (seen.known(items[2:]), seen.known(items[3:])) == ([2], [3])
    seen.clear()
    assert seen.known(items[2:]) == []


def test_none_are_held_where_none_are_wanted() -> None:
    item = Item()
    seen: Beginnings[Item, int] = Beginnings(held=0)
    seen.keep([item], [1])
    assert seen.known([item]) == []


@given(st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=12), st.integers(1, 4))
def test_what_is_known_is_what_was_kept(lists: list[list[int]], held: int) -> None:
    """Whatever is asked in whatever order: the values are those of the items, and the longest held beginning counts."""
    objects = [Item() for _ in range(4)]
    seen: Beginnings[Item, int] = Beginnings(held)
    for numbers in lists:
        items = [objects[number] for number in numbers]
        known = seen.known(items)
        assert known == numbers[: len(known)]
        seen.keep(items, numbers)
        assert seen.known(items) == numbers
