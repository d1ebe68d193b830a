"""What 2, 10 and 100 machines bring, and what it costs to spread conversations over them.

    python scripts/simulate_fleet.py [--users 4,8,12] [--machines 1,2,10,100] [--minutes 60]

A discrete-event simulation, the same numbers every time. A user has an API key and one conversation
after the other; a conversation's prompts grow by what a tool or the user says and by the answer,
and begin with the user's instructions and tools. Requests go to the machine with the fewest of them
("fewest"), or to one by consistent hashing with bounded loads as docs/examples/haproxy.cfg does, by
conversation or by key. A machine reads one prompt at a time, in half of its time while it also
decodes; what its cache has of a prompt it does not read. See Figures for what is assumed.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
from bisect import bisect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

Step = tuple[float, int, Callable[[], None]]


@dataclass(frozen=True)
class Figures:
    """Of a machine: the shipped Python pair on two cores, plain. tokens_per_second: of one text,
    docs/performance.md. together: times as many for so many texts, docs/batching.md. prompt_tokens:
    read in the time of a token of one text. Assumed: the rest. Means are those of geometric or
    exponential draws."""

    tokens_per_second: float = 172.0
    together: Sequence[tuple[int, float]] = ((1, 1.0), (4, 1.7), (16, 4.6))
    prompt_tokens: float = 20.0
    cache_tokens: int = 120_000
    batch: int = 16
    instructions: int = 4000
    more: float = 600.0
    answer: float = 150.0
    turns: float = 12.0
    think_seconds: float = 10.0

    def decoded(self, texts: int) -> float:
        """Return the tokens that so many texts have in a second, together."""
        (few, low), (many, high) = next(
            pair
            for pair in zip(self.together, self.together[1:], strict=False)
            if texts <= pair[1][0]
        )
        return self.tokens_per_second * (low + (high - low) * (texts - few) / (many - few))


FIGURES = Figures()
PLACES = 64
"""On the ring, for each machine."""


@dataclass(eq=False)
class Request:
    """came: in seconds. unread: tokens of the prompt; left: of the answer."""

    user: int
    talk: int
    tokens: int
    left: float
    came: float
    then: Callable[[], None]
    unread: float = 0.0


@dataclass(eq=False)
class Machine:
    """Reads and decodes. cache: tokens of instructions by (user, -1) and of a conversation behind
    them by (user, talk), the least recently used first. epoch: of the events that still count."""

    waiting: list[Request] = field(default_factory=list)
    decoding: list[Request] = field(default_factory=list)
    reading: Request | None = None
    cache: OrderedDict[tuple[int, int], int] = field(default_factory=OrderedDict)
    now: float = 0.0
    epoch: int = 0

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.decoding) + (self.reading is not None)

    def rates(self) -> tuple[float, float]:
        """Return the prompt tokens a second, and the tokens a second of each text."""
        share = 0.5 if self.reading and self.decoding else 1.0
        each = FIGURES.decoded(len(self.decoding)) / len(self.decoding) if self.decoding else 0.0
        return share * FIGURES.prompt_tokens * FIGURES.tokens_per_second, share * each

    def advance(self, now: float) -> None:
        read, written = self.rates()
        if self.reading:
            self.reading.unread -= read * (now - self.now)
        for each in self.decoding:
            each.left -= written * (now - self.now)
        self.now = now

    def cached(self, request: Request) -> int:
        """Return how many tokens of a prompt are cached, and make them the most recent ones."""
        found = 0
        for key in ((request.user, -1), (request.user, request.talk)):
            if key in self.cache:
                self.cache.move_to_end(key)
                found += self.cache[key]
        return found if (request.user, -1) in self.cache else 0

    def keep(self, request: Request, tokens: int) -> None:
        self.cache[request.user, -1] = FIGURES.instructions
        self.cache[request.user, request.talk] = tokens - FIGURES.instructions
        for key in ((request.user, request.talk), (request.user, -1)):
            self.cache.move_to_end(key)
        while sum(self.cache.values()) > FIGURES.cache_tokens:
            self.cache.popitem(last=False)


class Fleet:
    """Machines, their users and the clock."""

    def __init__(self, machines: int, users: int, choose: str, balance: float) -> None:
        self.dice = random.Random(1)
        self.machines = [Machine() for _ in range(machines)]
        self.choose, self.balance = choose, balance
        self.events: list[Step] = []
        self.numbers, self.talks = count(), count()
        self.now = 0.0
        self.waits: list[float] = []
        self.reused = self.prompts = 0
        ring = random.Random("ring")
        self.ring = sorted((ring.random(), at) for at in range(machines) for _ in range(PLACES))
        for user in range(users * machines):
            self.later(self.dice.expovariate(1 / FIGURES.think_seconds), self.begin, user)

    def later(self, seconds: float, call: Callable[..., None], *arguments: object) -> None:
        step = self.now + seconds, next(self.numbers), lambda: call(*arguments)
        heapq.heappush(self.events, step)

    def run(self, seconds: float) -> None:
        while self.events and self.events[0][0] < seconds:
            self.now, _, call = heapq.heappop(self.events)
            call()

    def drawn(self, mean: float) -> int:
        return 1 + int(self.dice.expovariate(1 / mean))

    def begin(self, user: int) -> None:
        self.turn(user, next(self.talks), FIGURES.instructions, self.drawn(FIGURES.turns))

    def turn(self, user: int, talk: int, tokens: int, turns: int) -> None:
        """Send a conversation's next prompt."""
        tokens, answer = tokens + self.drawn(FIGURES.more), self.drawn(FIGURES.answer)

        def then() -> None:
            wait = self.dice.expovariate(1 / FIGURES.think_seconds)
            if turns > 1:
                self.later(wait, self.turn, user, talk, tokens + answer, turns - 1)
            else:
                self.later(wait, self.begin, user)

        request = Request(user, talk, tokens, answer, self.now, then)
        machine = self.machines[self.place(request)]
        machine.advance(self.now)
        machine.waiting.append(request)
        self.settle(machine)

    def place(self, request: Request) -> int:
        """Return the number of the machine for a request."""
        loads = [each.load for each in self.machines]
        if self.choose == "fewest":
            least = min(loads)
            return self.dice.choice([at for at, load in enumerate(loads) if load == least])
        who = request.user if self.choose == "key" else request.talk
        at = bisect(self.ring, (random.Random(f"{self.choose} {who}").random(), 0))
        most = -(-self.balance * (sum(loads) + 1) // len(loads))
        around = (self.ring[(at + step) % len(self.ring)][1] for step in range(len(self.ring)))
        return next(each for each in around if loads[each] < most)

    def settle(self, machine: Machine) -> None:
        """Begin what a machine has room for, and set when it next ends something."""
        if machine.reading is None and machine.waiting and len(machine.decoding) < FIGURES.batch:
            request = machine.reading = machine.waiting.pop(0)
            cached = machine.cached(request)
            request.unread = request.tokens - cached
            self.reused += cached
            self.prompts += request.tokens
        machine.epoch += 1
        read, written = machine.rates()
        ends = [each.left / written for each in machine.decoding]
        ends += [machine.reading.unread / read] if machine.reading else []
        if ends:
            self.later(max(0.0, min(ends)), self.step, machine, machine.epoch)

    def step(self, machine: Machine, epoch: int) -> None:
        """End what has ended, unless something has come since this was planned."""
        if epoch != machine.epoch:
            return
        machine.advance(self.now)
        request = machine.reading
        if request is not None and request.unread < 1e-6:
            self.waits.append(self.now - request.came)
            machine.keep(request, request.tokens + int(request.left))
            machine.decoding.append(request)
            machine.reading = None
        for each in [each for each in machine.decoding if each.left < 1e-6]:
            machine.decoding.remove(each)
            each.then()
        self.settle(machine)


def simulate(machines: int, users: int, choose: str, balance: float, minutes: float) -> str:
    """Return a line of the table."""
    fleet = Fleet(machines, users, choose, balance)
    fleet.run(60 * minutes)
    middle, *_, late = statistics.quantiles(fleet.waits, n=20)[9::9]
    figures = f"{fleet.reused / fleet.prompts:.3f} | {middle:.2f} | {late:.1f}"
    return f"| {machines} | {users} | {choose} | {len(fleet.waits)} | {figures} |"


def main() -> None:
    """Run with the process's arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--users", default="4,6", help="users of each machine")
    parser.add_argument("--machines", default="1,2,10,100")
    parser.add_argument("--balance", type=float, default=1.5, help="as HAProxy has it, over 100")
    parser.add_argument("--minutes", type=float, default=60.0)
    given = parser.parse_args()
    print("| machines | users each | chosen by | requests | reused | median wait, s | 95 %, s |")
    print("|---|---|---|---|---|---|---|")
    for users in map(int, given.users.split(",")):
        for machines in map(int, given.machines.split(",")):
            for choose in ("fewest", "conversation", "key") if machines > 1 else ("key",):
                print(simulate(machines, users, choose, given.balance, given.minutes), flush=True)


if __name__ == "__main__":
    main()
