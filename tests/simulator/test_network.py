"""Network cards: who goes first, how long it takes, and what is void when its turn comes."""

from simulator.loop import Loop
from simulator.network import Network, Transfer


class Bench:
    def __init__(self, *rates):
        self.loop = Loop()
        self.network = Network(self.loop, rates, fixed_s=1.0)
        self.ends = []

    def send(self, name, source, target, size_bytes, at_s=0.0):
        transfer = Transfer(
            source, target, lambda: size_bytes,
            lambda: self.ends.append((name, self.loop.now_s)),
        )  # fmt: skip
        self.loop.at(at_s, lambda _: self.network.send(transfer))

    def run(self):
        self.loop.run()
        return self.ends


def test_a_transfer_occupies_both_cards_at_the_slower_ones_rate():
    bench = Bench(10.0, 5.0, 10.0)
    bench.send("a", 0, 1, 50.0)
    bench.send("b", 2, 1, 50.0)
    bench.send("c", 2, 0, 50.0, at_s=30.0)
    assert bench.run() == [("a", 11.0), ("b", 22.0), ("c", 36.0)]
    assert bench.network.busy_s == [17.0, 22.0, 17.0]


def test_nobody_overtakes_on_a_card():
    bench = Bench(10.0, 10.0, 10.0, 10.0)
    bench.send("a", 0, 1, 90.0)
    bench.send("b", 1, 2, 10.0)
    bench.send("c", 2, 3, 10.0)
    bench.send("d", 3, 0, 10.0)
    assert bench.run() == [("a", 10.0), ("b", 12.0), ("c", 14.0), ("d", 16.0)]


def test_what_is_void_when_its_turn_comes_takes_no_time():
    bench = Bench(10.0, 10.0)
    bench.send("a", 0, 1, 90.0)
    bench.send("void", 0, 1, 0.0)
    bench.send("b", 0, 1, 90.0)
    assert bench.run() == [("a", 10.0), ("void", 10.0), ("b", 20.0)]
    assert bench.network.busy_s == [20.0, 20.0]
