"""TensorBoard event files of a run."""

import time

SECONDS_BETWEEN_FLUSHES = 30


class Events:
    """An event file in `directory`, which may be in a bucket. Every method raises OSError if the disk fails.

    It writes in the calling thread. tensorboardX's SummaryWriter has a thread that ends at the first error of the disk;
    the run would then wait forever for that thread to take the next event.
    """

    def __init__(self, directory: str, resume_step: int):
        """TensorBoard hides the events of an earlier process after `resume_step`."""
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.record_writer import directory_check

        directory_check(directory)
        self._writer = EventsWriter(f"{directory}/events", f".{resume_step}")
        self._writer.write_event(Event(step=resume_step + 1, session_log=SessionLog(status=SessionLog.START)))
        self._flushed = time.monotonic()

    def add(self, step: int, tag: str, value) -> None:
        """Writes one number of a step."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        self._writer.write_event(Event(step=step, wall_time=time.time(), summary=scalar(tag, value)))
        if time.monotonic() - self._flushed >= SECONDS_BETWEEN_FLUSHES:
            self._flushed = time.monotonic()
            self._writer.flush()

    def close(self) -> None:
        self._writer.close()
