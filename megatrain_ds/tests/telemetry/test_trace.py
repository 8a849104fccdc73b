"""The Chrome trace: its window, its tracks, its clock, and the tracer that does nothing."""

from __future__ import annotations

import json
import threading
import time

import pytest

from megatrain_ds.telemetry.trace import TRACKS, ChromeTracer, NullTracer


@pytest.fixture
def file(tmp_path):
    return tmp_path / "folder" / "trace.json"


def spans(file) -> list[tuple[str, str]]:
    events = json.loads(file.read_text())["traceEvents"]
    return [(TRACKS[event["tid"]], event["name"]) for event in events if event["ph"] == "X"]


def make(file, *, skip: int = 0, steps: int = 1) -> ChromeTracer:
    return ChromeTracer(str(file), skip_steps=skip, num_steps=steps, use_cuda=False)


def test_only_the_steps_of_the_window_are_written(file):
    tracer = make(file, skip=1, steps=2)
    active = []
    for step in range(5):
        active.append(tracer.active)
        with tracer.host_span("update", f"host {step}"):
            pass
        now = time.perf_counter()
        tracer.device_span("h2d", f"device {step}", now, now)
        assert file.exists() == (step > 2)
        tracer.step_done()
    assert active == [False, True, True, False, False]
    assert spans(file) == [("update", "host 1"), ("h2d", "device 1"), ("update", "host 2"), ("h2d", "device 2")]


def test_events_are_chromes_with_microseconds_and_named_tracks(file):
    tracer = make(file)
    start = time.perf_counter()
    tracer.device_span("compute", "block", start + 0.001, start + 0.003)
    tracer.step_done()
    events = json.loads(file.read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == dict(enumerate(TRACKS))
    (span,) = [event for event in events if event["ph"] == "X"]
    assert set(span) == {"ph", "pid", "tid", "name", "ts", "dur"}
    assert span["dur"] == pytest.approx(2000.0)
    assert span["ts"] > 0.0


def test_events_are_sorted_by_time(file):
    tracer = make(file)
    now = time.perf_counter()
    for offset in (3, 1, 2):
        tracer.device_span("d2h", str(offset), now + offset, now + offset + 1)
    tracer.step_done()
    assert spans(file) == [("d2h", "1"), ("d2h", "2"), ("d2h", "3")]


def test_a_span_is_recorded_when_its_work_fails(file):
    tracer = make(file)
    with pytest.raises(ZeroDivisionError), tracer.host_span("wait", "broken"):
        _ = 1 / 0
    tracer.step_done()
    assert spans(file) == [("wait", "broken")]


def test_closing_early_writes_what_there_is_once(file):
    tracer = make(file, steps=9)
    with tracer.host_span("update", "only"):
        pass
    tracer.close()
    assert spans(file) == [("update", "only")]
    file.unlink()
    tracer.close()
    tracer.step_done()
    assert not file.exists()


def test_a_window_that_never_began_writes_nothing(file):
    tracer = make(file, skip=2)
    tracer.step_done()
    tracer.close()
    assert not file.exists()


def test_spans_of_several_threads_are_all_kept(file):
    tracer = make(file)

    def work(track: str) -> None:
        for index in range(50):
            with tracer.host_span(track, str(index)):
                pass

    threads = [threading.Thread(target=work, args=(track,)) for track in ("update", "wait")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tracer.step_done()
    assert len(spans(file)) == 100


def test_the_null_tracer_does_nothing():
    tracer = NullTracer()
    with tracer.host_span("update", "x"):
        pass
    tracer.device_span("h2d", "x", 0.0, 1.0)
    tracer.step_done()
    tracer.close()
    assert not tracer.active
    assert vars(tracer) == {}


def test_every_step_of_the_window_is_summarized_in_the_file_and_in_the_log(file, caplog):
    tracer = make(file, skip=1, steps=2)
    with caplog.at_level("INFO", logger="megatrain_ds"):
        for _ in range(4):
            with tracer.host_span("wait", "update of x"):
                time.sleep(0.01)
            tracer.step_done()
    steps = json.loads(file.read_text())["otherData"]["steps"]
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["waits_s"]["update of x"] >= 0.01 for step in steps)
    lines = [record.message for record in caplog.records if "limited by host waits" in record.message]
    assert [line.split(":")[1] for line in lines] == [" step 1", " step 2"]


def test_a_window_that_begins_at_once_has_its_first_step(file):
    tracer = make(file)
    time.sleep(0.01)
    tracer.step_done()
    (step,) = json.loads(file.read_text())["otherData"]["steps"]
    assert step["seconds"] >= 0.01


def test_a_trace_that_cannot_be_written_is_a_warning_and_no_error(file):
    file.mkdir(parents=True)
    tracer = make(file)
    with pytest.warns(RuntimeWarning, match=r"trace_file = '.*trace.json': the trace could not be written \(Is a dir"):
        tracer.step_done()
    tracer.close()


def test_a_window_that_never_began_is_named_once(file):
    tracer = make(file, skip=3)
    tracer.step_done()
    with pytest.warns(RuntimeWarning, match="training ended after 1 steps and it begins after 3"):
        tracer.close()
    tracer.close()
    assert not file.exists()


def test_the_file_is_where_it_was_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tracer = make("trace.json")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    tracer.step_done()
    assert (tmp_path / "trace.json").exists()
