"""The limit of requests in flight falls where answers wait as long as they are served, and grows again where they do not."""

from workers.flow_control import FlowControl, WorkerLoad

CEILING = 128


def answer(flow: FlowControl, times: int, *, queue_ms: float, preemptions: int = 0) -> None:
    """So many answers of a worker that is kept as busy as the limit allows."""
    for _ in range(times):
        in_flight = flow.limit
        flow.sent(in_flight)
        flow.answered(WorkerLoad(queue_ms=queue_ms, service_ms=100, running=in_flight, preemptions=preemptions), in_flight)


def test_a_worker_that_takes_all_keeps_the_ceiling():
    flow = FlowControl(CEILING)
    answer(flow, 3 * CEILING, queue_ms=0)
    assert flow.limit == CEILING


def test_the_limit_falls_once_for_a_burst_and_grows_again_when_the_worker_recovers():
    flow = FlowControl(CEILING)
    answer(flow, 2 * CEILING - 1, queue_ms=900)
    assert flow.limit == int(0.7 * CEILING), "answers sent before the cut do not cut again"
    answer(flow, 100 * CEILING, queue_ms=900)
    assert flow.limit == CEILING // 16 and flow.has_room(CEILING // 16 - 1) and not flow.has_room(CEILING // 16)
    answer(flow, 100 * CEILING, queue_ms=0)
    assert flow.limit == CEILING


def test_preemptions_cut_the_limit_but_not_those_before_the_first_answer():
    flow = FlowControl(CEILING)
    answer(flow, CEILING, queue_ms=0, preemptions=10**6)
    assert flow.limit == CEILING
    answer(flow, CEILING, queue_ms=0, preemptions=2 * 10**6)
    assert flow.limit < CEILING
