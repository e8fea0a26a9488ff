"""The life of one group, from an example to verdicts: the only place that encodes, generates, converses and judges.

    example ─▶ prompt ─▶ n completions ─▶ each converses ─▶ drawn ─▶ judged ─▶ chosen ─▶ Group
                                             │     ▲
                 what it drew, if it ended ──▶     └── the reply is appended, and one more turn is drawn

Any number of groups live side by side in one asyncio loop; whoever wants groups says how many. A conversation is one
stream of token ids that is only ever extended.
"""

import asyncio
import hashlib
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from envs.chat import Encoder, answer_prefill
from envs.example import CompletionInRun
from envs.group import Group, SampledCompletion, Sampling, Times, Verdict
from envs.judging.lowest_scores import LowestScores
from envs.task import Completion, Example
from envs.teacher_prompt import TeacherPrompt
from envs.turns import Conversation
from torchgrpo.rollout.engines.interface import Request, Sampler

Judge = Callable[[Sequence[Completion], Sequence[Example]], Awaitable[Sequence[Verdict]]]
"""The verdicts on completions, in their order; each is judged against the example at its place."""
KeepGroup = Callable[[Group], bool]
"""Dynamic sampling: whether a judged group is trained on; the others are replaced."""


@dataclass(eq=False)
class Generation:
    """Makes groups of completions, each with its verdict.

    Args:
        conversation: what replies between turns; None where a completion has but one.
        sampling: of groups begun from now on.
        candidates: completions that are generated for a prompt.
        repeats: completions of a group; where that is less, a balanced choice of the candidates.
        seed: with the group id it fixes every draw and the choice.
        lowest: scores of its groups; whoever takes groups has their invalid completions settled by it.
        teacher: makes the prompt that a teacher sees; None where it sees the policy's own.
    """

    sampler: Sampler
    encoder: Encoder
    judge: Judge
    conversation: Conversation | None
    sampling: Sampling
    candidates: int
    repeats: int
    seed: int
    lowest: LowestScores = field(default_factory=LowestScores)
    teacher: TeacherPrompt | None = None

    async def run_group(
        self, example: Example, group_id: int, drawn: Callable[[], None] = lambda: None
    ) -> Group:
        """One group, judged.

        group_id: the caller's, in the order of drawing. drawn: called when the last token is there.
        """
        begun = time.time()
        request = self.request(self.encoder.encode(example), group_id)
        candidates = await self.generate(request)
        drawn()
        return await self.judged(request, example, candidates, begun)

    def request(self, prompt: tuple[int, ...], group_id: int) -> Request:
        """What is asked for a group's first turn."""
        return Request(group_id, prompt, self.candidates, self.sampling, (self.seed << 40) + group_id)

    async def generate(self, request: Request) -> list[SampledCompletion]:
        """The completions of a request, every turn of them."""
        completions = await self.sampler.generate(request)
        if self.conversation is not None:
            async with asyncio.TaskGroup() as conversing:
                for row, one in enumerate(completions):
                    conversing.create_task(self._converse(self.conversation, request, row, one))
        return completions

    async def _converse(
        self, conversation: Conversation, request: Request, row: int, whole: SampledCompletion
    ) -> None:
        """Extends a completion turn by turn. `max_tokens` holds for all of it; a reply without room ends it."""
        turn, last, whole.sampled = 1, whole.token_ids, [True] * len(whole.token_ids)
        while whole.finish_reason == "stop" and (reply := await conversation.reply(last, turn)):
            if request.sampling.max_tokens - len(whole.token_ids) <= len(reply):
                whole.finish_reason = "length"
                return
            _append(whole, SampledCompletion(reply, [0.0] * len(reply), [], "stop"), sampled=False)
            # One more turn: its prompt is all that there is, its seed the same whatever else is generated when.
            room = request.sampling.max_tokens - len(whole.token_ids)
            digest = hashlib.blake2b(f"{request.seed}/{row}/{turn}".encode(), digest_size=8).digest()
            more = replace(
                request,
                prompt=(*request.prompt, *whole.token_ids),
                n=1,
                sampling=replace(request.sampling, max_tokens=room),
                seed=int.from_bytes(digest, "little") >> 1,
            )
            (drawn,) = await self.sampler.generate(more)
            _append(whole, drawn, sampled=True)
            turn, last, whole.finish_reason = turn + 1, drawn.token_ids, drawn.finish_reason
            whole.engine = drawn.engine

    async def judged(
        self, request: Request, example: Example, candidates: list[SampledCompletion], begun: float
    ) -> Group:
        """The group of what a request drew. begun: when its prompt was encoded, in seconds of `time.time()`."""
        drawn, prompt_text = time.time(), self.encoder.prompt_text(request.prompt)
        self.encoder.decode(candidates, answer_prefill(prompt_text, example.prefill))
        shown = [
            CompletionInRun(**vars(one.shown), token_ids=tuple(one.token_ids))
            for one in candidates
            if one.shown is not None
        ]
        verdicts = await self.judge(shown, [example] * len(shown))
        for one, verdict in zip(candidates, verdicts, strict=True):
            one.verdict = verdict
        pairs = list(zip(candidates, choose_balanced(verdicts, self.repeats, request.seed), strict=True))
        return Group(
            request.request_id,
            example,
            request.prompt,
            prompt_text,
            request.sampling,
            [one for one, chosen in pairs if chosen],
            Times(begun, drawn, time.time()),
            [one for one, chosen in pairs if not chosen],
            teacher_prompt=self.teacher_prompt(example),
        )

    def teacher_prompt(self, example: Example) -> tuple[int, ...]:
        """Token ids of the teacher's prompt; none where it is the policy's."""
        return () if self.teacher is None else self.encoder.encode(self.teacher.example(example))


def choose_balanced(verdicts: Sequence[Verdict], repeats: int, seed: int) -> list[bool]:
    """`repeats` of a prompt's candidates: as many right as wrong ones, or as near to it as there are.

    Which of the right (or wrong) ones is random, fixed by `seed`. Those whose judging failed are taken last.
    """
    chance = random.Random(seed)
    order = sorted(range(len(verdicts)), key=[chance.random() for _ in verdicts].__getitem__)
    right = [place for place in order if verdicts[place].judged and verdicts[place].success > 0.5]
    wrong = [place for place in order if verdicts[place].judged and verdicts[place].success <= 0.5]
    failed = [place for place in order if not verdicts[place].judged]
    take_right = min(len(right), max(repeats - len(wrong), repeats // 2))
    take_wrong = min(len(wrong), repeats - take_right)
    chosen = {*right[:take_right], *wrong[:take_wrong], *failed[: repeats - take_right - take_wrong]}
    return [place in chosen for place in range(len(verdicts))]


def _append(whole: SampledCompletion, more: SampledCompletion, sampled: bool) -> None:
    """What nothing drew has the version of the token before it."""
    whole.token_ids = whole.token_ids + more.token_ids
    whole.log_probs = whole.log_probs + more.log_probs
    versions = more.policy_versions if sampled else whole.policy_versions[-1:] * len(more.token_ids)
    whole.policy_versions = whole.policy_versions + versions
    whole.sampled += [sampled] * len(more.token_ids)
