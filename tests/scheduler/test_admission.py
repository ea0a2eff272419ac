"""What one iteration gives out, and to whom: due ones, loads, the packed rest."""

import pytest

from kappa_scheduler.admission import AdmissionRound, Candidate, WindowFill
from kappa_scheduler.blocks import Ledger
from kappa_scheduler.config import LinkRates
from kappa_scheduler.loads import JustInTime
from kappa_scheduler.tenant_charges import AHEAD, FAR_AHEAD, IN_TURN
from kappa_scheduler.work import BUDGET, LINK, RESERVED, SLOTS, VRAM, Quote, Room
from tests.scheduler.engine import Blocks, Request


class Bench:
    """One iteration over `capacity` blocks of which somebody else has `used`."""

    def __init__(self, capacity=100, used=0, budget=50, slots=8, reserve=True):
        self.memory, self.ledger = Blocks(capacity), Ledger()
        self.link = JustInTime(LinkRates(0.01))
        self.admitted = []
        self.budget, self.slots, self.reserve = budget, slots, reserve
        if used:
            self.holder = Request(used)
            self.memory.take(self.holder, self.memory.quote(self.holder))
            self.ledger.admit(self.holder, Quote(used, 0, 0), used, 0, False)

    def candidate(self, tokens, cached=0, host=0, reserve=0, tier=IN_TURN):
        quote = Quote(tokens, cached, host)
        ratio = self.memory.capacity_blocks / max(self.budget, 1)
        made = Candidate(Request(tokens), quote, tokens, reserve, ratio)
        made.tier, made.reserves = tier, self.reserve and tier == IN_TURN
        return made

    def round(self, *candidates):
        room = Room(self.memory, self.budget, self.slots, len(self.ledger))

        def admit(candidate):
            work, quote = candidate.work, candidate.quote
            if quote.blocks > self.memory.available():
                return False
            self.memory.take(work, quote)
            blocks = candidate.footprint - candidate.reserve
            self.ledger.admit(work, quote, blocks, candidate.reserve, candidate.high)
            if quote.host_tokens:
                self.link.start(work, quote.host_tokens, 0.0)
            self.admitted.append(candidate)
            return True

        return AdmissionRound(self.ledger, self.link, room, 0.0, candidates, admit)


@pytest.mark.parametrize(
    ("bench", "tokens", "admitted", "why"),
    [
        # What fits is computed, and the others know why not.
        ({"used": 70}, [20, 40, 10], [0, 2], ["", VRAM, ""]),
        ({"used": 10, "budget": 0}, [10], [], [BUDGET]),
        ({"used": 10, "slots": 0}, [10], [], [SLOTS]),
        # The best for the slots there are.
        ({"capacity": 60, "used": 10, "slots": 1}, [5, 45], [1], None),
    ],
)
def test_fill_budget_admits_what_fits_and_says_why_not(bench, tokens, admitted, why):
    made = Bench(**bench)
    candidates = [made.candidate(count) for count in tokens]
    made.round(*candidates).fill_budget(candidates)
    assert made.admitted == [candidates[at] for at in admitted]
    assert why is None or [candidate.why for candidate in candidates] == why


def test_with_nothing_running_whatever_fits_may_start():
    bench = Bench()
    one = bench.candidate(90, reserve=50)
    bench.round(one).fill_budget([one])
    assert bench.admitted == [one]


def test_blocks_are_set_aside_for_a_starving_request_in_turn():
    bench = Bench(used=70)
    starving = bench.candidate(60)
    fits, too_large = bench.candidate(30), bench.candidate(25)
    admission = bench.round(starving, fits, too_large)
    admission.admit_starving(starving)
    assert starving.why == VRAM and bench.ledger.reserved_for is starving.work
    admission.fill_budget([fits, too_large])
    assert bench.admitted == [fits] and too_large.why in (RESERVED, VRAM)
    assert bench.ledger.spare(bench.memory) == 10


@pytest.mark.parametrize(("reserve", "tier"), [(False, IN_TURN), (True, AHEAD), (True, FAR_AHEAD)])
def test_no_blocks_are_set_aside_out_of_turn_or_if_switched_off(reserve, tier):
    bench = Bench(used=70, reserve=reserve)
    starving = bench.candidate(60, tier=tier)
    bench.round(starving).admit_starving(starving)
    assert starving.why == VRAM and bench.ledger.reserved_for is None


def test_load_does_not_take_the_budget_of_a_starving_request():
    bench = Bench(used=10, budget=0)
    starving, load = bench.candidate(20), bench.candidate(20, host=10)
    admission = bench.round(starving, load)
    admission.admit_starving(starving)
    admission.start_loads([load])
    admission.stage_second_load()
    assert starving.why == BUDGET and load.why == RESERVED and not bench.admitted


def test_loads_need_no_budget():
    bench = Bench(used=10, budget=0, slots=0)
    load = bench.candidate(20, host=10)
    bench.round(load).start_loads([load])
    assert bench.admitted == [load]


def test_loads_wait_for_the_link_without_blocks():
    bench = Bench(capacity=1000, used=10)
    bench.link.start(Request(1), 500, 0.0)
    bench.link.start(Request(1), 500, 0.0)
    loads = [bench.candidate(20, host=10) for _ in range(3)]
    admission = bench.round(*loads)
    admission.start_loads(loads)
    admission.stage_second_load()
    assert not bench.admitted and {c.why for c in loads} == {LINK}


def test_second_load_is_staged_when_nobody_else_wants_the_blocks():
    for wanted in (False, True):
        bench = Bench(used=50)
        bench.link.start(Request(1), 500, 0.0)
        load, other = bench.candidate(20, host=10), bench.candidate(60)
        admission = bench.round(load, other)
        admission.start_loads([load])
        if wanted:
            admission.fill_budget([other])
        admission.stage_second_load()
        assert bench.admitted == ([] if wanted else [load])


def test_far_ahead_is_withheld_while_one_in_turn_awaits_blocks():
    bench = Bench(used=70)
    first, far = bench.candidate(60), bench.candidate(5, tier=FAR_AHEAD)
    admission = bench.round(first, far)
    assert not admission.withhold_from_far_ahead()
    admission.fill_budget([first])
    assert admission.withhold_from_far_ahead() and far.why == RESERVED


def test_an_engine_that_refuses_keeps_the_request_waiting():
    bench = Bench()
    one = bench.candidate(50)
    admission = bench.round(one)
    bench.memory.take(Request(80), Quote(80, 0, 0))
    admission.fill_budget([one])
    assert not bench.admitted and one.why == VRAM


def test_window_is_not_filled_by_what_may_not_pass_a_reservation():
    bench = Bench(used=20, budget=50)
    bench.ledger.reserve(Request(95), 95, bench.memory)
    seen = WindowFill(bench.ledger, Room(bench.memory, 50, 8, 1))
    seen.add(bench.candidate(60), reserved=False)
    assert not seen.full


def test_while_the_cap_may_bind_only_others_fill_the_iteration():
    bench = Bench(capacity=1000, budget=50)
    seen = WindowFill(bench.ledger, Room(bench.memory, 50, 8, 1))
    seen.add(bench.candidate(20), reserved=False)
    seen.add(bench.candidate(900, cached=860), reserved=False)
    assert not seen.full


def test_what_just_fits_is_admitted_and_a_block_more_is_not():
    # Twenty of its blocks are for decoding: they must fit, too.
    for tokens, why in ((20, ""), (21, VRAM)):
        bench = Bench(capacity=100, used=60, budget=1000)
        candidate = bench.candidate(tokens, reserve=20)
        bench.round(candidate).fill_budget([candidate])
        assert (candidate.why, candidate.admitted) == (why, not why)


def test_reservation_leaves_the_remaining_blocks_to_the_last_one():
    for tokens, why in ((30, ""), (31, RESERVED)):
        bench = Bench(capacity=100, used=10, budget=1000)
        bench.ledger.reserve(Request(70), 70, bench.memory)
        candidate = bench.candidate(tokens)
        bench.round(candidate).fill_budget([candidate])
        assert candidate.why == why


def test_high_ratio_cap_is_their_share_of_blocks_wanted_and_held():
    # 100 blocks, a budget of 50: two blocks a token are not high yet, 60 for 1 token are.
    bench = Bench(capacity=100, used=20)
    high, low = bench.candidate(60, cached=59), bench.candidate(20)
    assert high.high and not low.high and not bench.candidate(2, cached=1).high
    # 60 of the 60 + 20 that wait and the 20 that are held.
    assert bench.round(high, low)._cap == pytest.approx(100 * 60 / 100)
    assert bench.round(high)._cap == bench.round(low)._cap == 100.0


def test_candidate_counts_its_footprint_and_a_new_token_at_least():
    bench = Bench()
    candidate = bench.candidate(40, cached=40, reserve=5)
    assert (candidate.new_tokens, candidate.blocks, candidate.footprint) == (1, 45, 45)
    other = bench.candidate(40, cached=10, host=7)
    assert other.new_tokens == 23 and other.waits


def test_the_iteration_is_seen_to_be_full_at_its_last_token():
    bench = Bench(budget=50)
    seen = WindowFill(bench.ledger, Room(bench.memory, 50, 8, 0))
    seen.add(bench.candidate(49), reserved=False)
    assert not seen.full
    seen.add(bench.candidate(1), reserved=False)
    assert seen.full
    assert WindowFill(bench.ledger, Room(bench.memory, 50, 0, 0)).full, "no slot is left"
    assert WindowFill(bench.ledger, Room(bench.memory, 0, 1, 0)).full, "no budget is left"
    # What exceeds the blocks fills nothing; exactly all of them does.
    for tokens, full in ((101, False), (100, True)):
        seen = WindowFill(bench.ledger, Room(bench.memory, 60, 8, 0))
        seen.add(bench.candidate(tokens), reserved=False)
        assert seen.full is full
