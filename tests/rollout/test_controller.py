"""The controller with an engine and a judge that do as they are told: who may start, and how old a group is."""

from dataclasses import dataclass, field

from rollout.controller import Controller

from envs.group import SampledCompletion, Sampling
from rollout.engines.sampler import Request, Response
from rollout.group_buffer import GroupBuffer


@dataclass
class Script:
    """Engine and source in one; a group is the number of its request. Verdicts come when `verdicts` names them.

    answers: what the next engine step returns. refused: groups that are replaced once.
    """

    answers: list[Response] = field(default_factory=list)
    verdicts: list[int] = field(default_factory=list)
    refused: set[int] = field(default_factory=set)
    submitted: list[int] = field(default_factory=list)
    judging: list[int] = field(default_factory=list)
    waits: list[tuple[str, float]] = field(default_factory=list)

    def submit(self, request: Request) -> None:
        self.submitted.append(request.request_id)

    def step(self, timeout: float) -> list[Response]:
        self.waits.append(("engine", timeout))
        answers, self.answers = self.answers, []
        return answers

    def begin(self, count: int) -> list[tuple[Request, int]]:
        first = len(self.submitted)
        return [(request(number), number) for number in range(first, first + count)]

    def judge(self, answered: list[tuple[int, Response]]) -> None:
        assert answered
        self.judging += [group for group, _ in answered]

    def judged(self, timeout: float) -> list[int]:
        self.waits.append(("judge", timeout))
        verdicts, self.verdicts = self.verdicts, []
        return verdicts

    def replacement(self, group: int) -> tuple[Request, int] | None:
        if group not in self.refused:
            return None
        self.refused.remove(group)
        ((request, another),) = self.begin(1)
        return request, another


def request(number: int) -> Request:
    return Request(number, (), 1, Sampling(), seed=0)


def response(number: int, *versions: list[int]) -> Response:
    """An answer of one completion for each list of its tokens' versions."""
    return Response(
        number, [SampledCompletion([7] * len(of), [0.0] * len(of), of, "stop") for of in versions]
    )


def controlled(
    in_flight: int, max_age: int = 1000, keep_order: bool = True
) -> tuple[Controller[int], Script, GroupBuffer[int]]:
    buffer: GroupBuffer[int] = GroupBuffer(
        batch_groups=1, max_age=max_age, batches_per_version=1, capacity=1000, keep_order=keep_order
    )
    script = Script()
    return Controller(script, script, buffer, in_flight), script, buffer


def test_no_more_groups_are_generated_than_the_engines_hold() -> None:
    controller, script, _ = controlled(in_flight=3)
    for _ in range(2):
        controller.admit()
        assert controller.generating == 3
        assert script.submitted == [0, 1, 2]
    script.answers = [response(1, [0])]
    controller.advance(0.0)
    controller.admit()  # one is judged now: its place at the engines is free
    assert script.judging == [1]
    assert script.submitted == [0, 1, 2, 3]
    assert (controller.generating, controller.groups_in_flight) == (3, 4)


def test_a_group_is_as_old_as_its_oldest_token() -> None:
    """Weights were pushed while it was generated: its tokens are of versions 0 to 3, and `drop` bounds the age at 1."""
    controller, script, buffer = controlled(in_flight=1, max_age=1, keep_order=False)
    controller.admit()
    script.answers, script.verdicts = [response(0, [3, 3], [2, 0, 3])], [0]
    controller.advance(0.0)
    buffer.pushed(3)
    returned: list[int] = []
    assert buffer.take_now(returned.append) is None
    assert returned == [0]


def test_a_group_that_is_not_worth_training_on_hands_on_its_place() -> None:
    controller, script, buffer = controlled(in_flight=2)
    controller.admit()
    script.refused = {0}
    script.answers, script.verdicts = [response(0, [0]), response(1, [0])], [0, 1]
    controller.advance(0.0)
    assert script.submitted == [0, 1, 2]
    assert (controller.generating, controller.groups_in_flight) == (1, 1)
    assert buffer.take_now(_never) is None  # the first place is not filled yet
    script.answers, script.verdicts = [response(2, [0])], [2]
    controller.advance(0.0)
    assert [buffer.take_now(_never), buffer.take_now(_never)] == [[2], [1]]
    assert controller.groups_in_flight == 0


def test_it_waits_for_the_engine_and_only_without_one_for_the_judge() -> None:
    controller, script, _ = controlled(in_flight=1)
    controller.admit()
    script.answers = [response(0, [0])]
    controller.advance(0.5)
    controller.advance(0.5)
    assert script.waits == [("engine", 0.5), ("judge", 0.5), ("judge", 0.5)]
    controller.admit()
    controller.advance(0.5)
    assert script.waits[3:] == [("engine", 0.5), ("judge", 0.0)]


def test_what_no_batch_has_taken_is_told_in_its_order() -> None:
    """Ready groups first, then those in flight as they were admitted, whatever came in their places."""
    controller, script, _ = controlled(in_flight=4)
    controller.admit()
    script.refused = {0}
    script.answers, script.verdicts = [response(3, [0]), response(0, [0])], [3, 0]
    controller.advance(0.0)
    assert controller.outstanding() == [3, 4, 1, 2]


def _never(group: int) -> None:
    raise AssertionError(f"group {group} was given back")
