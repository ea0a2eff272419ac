"""Who may have killed an engine: events with their times in, verdicts out."""

from kappa_router.live.suspects import MEMORY, Suspects


def died(suspects, worker="w", in_flight=1, now_s=0.0, node="n"):
    suspects.died(worker, node, in_flight, now_s)


def test_request_alone_is_blamed_and_one_among_others_retried():
    suspects = Suspects()
    died(suspects, "v", in_flight=1)
    died(suspects, "w", in_flight=2)
    assert suspects.blame("v", "x", 0.1) == "alone"
    assert [suspects.blame("w", content, 0.1) for content in "yz"] == ["retry", "retry"]


def test_first_sign_of_a_death_decides_who_was_there():
    suspects = Suspects()
    died(suspects, in_flight=3)
    died(suspects, in_flight=1, now_s=1.0)  # two were told before it
    assert suspects.blame("w", "x", 1.0) == "retry"
    died(suspects, in_flight=1, now_s=11.0)  # it came back, and died again
    assert suspects.blame("w", "y", 11.0) == "alone"


def test_request_that_just_ended_is_company_for_a_moment():
    suspects = Suspects()
    for worker, ended_s in (("v", 90.0), ("w", 89.9)):
        suspects.ended(worker, ended_s)
        died(suspects, worker, now_s=100.0)
    assert suspects.blame("v", "x", 100.0) == "retry"
    assert suspects.blame("w", "y", 100.0) == "alone"


def test_two_deaths_convict_unless_an_engine_served_between():
    suspects = Suspects()
    for worker in "vw":
        died(suspects, worker, in_flight=5)
    assert [suspects.blame(worker, "x", 1.0) for worker in "vw"] == ["retry", "killer"]
    assert suspects.refused("x", 601.0) and not suspects.refused("x", 601.1)
    assert suspects.blame("v", "y", 1.0) == "retry"
    suspects.served("y")
    assert suspects.blame("w", "y", 1.0) == "retry" and not suspects.refused("y", 1.0)


def test_many_requests_lost_with_one_engine_are_one_death():
    suspects = Suspects()
    died(suspects, "v", in_flight=4)
    assert [suspects.blame("v", "x", 1.0) for _ in range(3)] == ["retry"] * 3
    assert not suspects.refused("x", 1.0)
    died(suspects, "w", in_flight=4, now_s=2.0)
    assert [suspects.blame("w", "x", 2.0) for _ in range(2)] == ["killer"] * 2


def test_blame_needs_a_recent_death():
    suspects = Suspects()
    assert suspects.blame("w", "x", 0.0) == "retry"
    died(suspects)
    assert suspects.blame("w", "x", 10.1) == "retry" and len(suspects) == 0


def test_node_whose_idle_engine_died_is_blamed_for_a_while():
    suspects = Suspects()
    died(suspects, "v", in_flight=0)
    died(suspects, "w", in_flight=1, now_s=60.0)
    assert suspects.blame("w", "x", 60.0) == "retry" and len(suspects) == 0
    died(suspects, "u", in_flight=1, now_s=60.0, node="other")
    assert suspects.blame("u", "x", 60.0) == "alone"
    died(suspects, "t", in_flight=1, now_s=60.1)
    assert suspects.blame("t", "y", 60.1) == "alone"


def test_content_that_is_not_known_is_judged_and_not_remembered():
    suspects = Suspects()
    died(suspects)
    assert [suspects.blame("w", "", 0.0) for _ in range(3)] == ["alone"] * 3
    assert len(suspects) == 0 and not suspects.refused("", 0.0)


def test_memory_is_bounded():
    suspects = Suspects()
    for i in range(3 * MEMORY):
        died(suspects, f"w{i}", now_s=float(i))
        suspects.ended(f"w{i}", float(i))
        suspects.blame(f"w{i}", f"c{i}", float(i))
        suspects.left(f"w{i}")
    assert len(suspects) <= MEMORY and len(suspects._deaths) < 20
    assert suspects._ended_s == {} and suspects._idle_deaths_s == {}
