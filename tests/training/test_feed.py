"""Batches on the devices: in order, placed by the thread of the loop, and what counts as waiting for input."""

import threading
import time

import pytest

from xfresearch.data.pipeline import Prefetch
from xfresearch.training.feed import Feed


class Read(Prefetch):
    """A Prefetch whose next batch is always there."""

    def ready(self) -> bool:
        return bool(self._waiting) and self._waiting[0][1].exception() is None


def make_feed(count: int, read_takes: float = 0.0, place_takes: float = 0.0, batches=Prefetch) -> Feed:
    def place(batch):
        time.sleep(place_takes)
        return batch, threading.get_ident()

    return Feed(batches(lambda step: time.sleep(read_takes) or 10 * step, range(count), 2), place, ahead=2)


@pytest.mark.parametrize("batches", [Prefetch, Read])
def test_batches_come_in_order_from_the_thread_of_the_loop(batches):
    order, feed = [], make_feed(5, batches=batches)
    for each in feed:
        feed.place_ahead()
        feed.place_ahead()
        order.append(each)
    assert order == [(step, (10 * step, threading.get_ident())) for step in range(5)]


def test_placing_counts_as_input_only_where_no_update_runs():
    feed = make_feed(6, place_takes=0.05, batches=Read)
    for number, _ in enumerate(feed):
        if number < 3:
            feed.place_ahead()
    assert 2 * 0.05 <= feed.wait_seconds < 4 * 0.05  # the first and the last; the others were placed two at a time


def test_several_batches_are_placed_in_a_row_once_none_is_left():
    placed = []
    with Prefetch(lambda step: step, range(7), 7) as batches:
        feed, counts = Feed(batches, lambda batch: placed.append(batch) or batch, ahead=3), []
        for _ in range(7):
            next(feed)
            while batches._waiting and not batches.ready():
                time.sleep(0.001)
            feed.place_ahead()
            counts.append(len(placed))
    assert counts == [4, 4, 4, 7, 7, 7, 7]
    assert placed == list(range(7))


def test_waiting_for_the_other_thread_counts_as_input():
    feed = make_feed(6, read_takes=0.05)
    for _ in feed:
        feed.place_ahead()
    assert feed.wait_seconds > 4 * 0.05


def test_an_error_of_reading_is_raised_at_its_step_and_not_ahead():
    with Prefetch(lambda step: 1 / (1 - step), range(3), 2) as batches:
        feed = Feed(batches, lambda batch: batch, ahead=2)
        assert next(feed) == (0, 1.0)
        batches._waiting[0][1].exception()  # it has failed
        feed.place_ahead()
        with pytest.raises(ZeroDivisionError):
            next(feed)
