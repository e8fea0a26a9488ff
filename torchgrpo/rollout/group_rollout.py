"""Samples a group's completions turn by turn, scores them, and balances right against wrong ones.

    example ─▶ prompt ─▶ n completions ─▶ turns of each ─▶ sampled ─▶ scored ─▶ chosen ─▶ Group
                                            │   ▲
               tokens of a finished turn ─▶ └───┘ a reply is appended, and one more turn is sampled

No other module encodes prompts, samples, runs turns and scores completions. Any number of groups run concurrently in
one asyncio loop; the caller decides how many. A conversation is one stream of token ids that is only ever extended.
"""

import asyncio
import hashlib
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from envs.chat import ChatEncoder, answer_prefill
from envs.example import CompletionInRun
from envs.group import Group, GroupTimes, SampledCompletion, Sampling, Verdict
from envs.reward_workers.minimum_scores import MinimumScores
from envs.task import Completion, Example
from envs.teacher_prompt import TeacherPrompt
from envs.turns import Conversation
from torchgrpo.rollout.engines.interface import Request, Sampler

CompletionScorer = Callable[[Sequence[Completion], Sequence[Example]], Awaitable[Sequence[Verdict]]]
"""Async function that scores completions, each against the example at the same index; returns verdicts in order."""
KeepGroup = Callable[[Group], bool]
"""Predicate of dynamic sampling: whether to train on a scored group; other groups are replaced."""


@dataclass(eq=False)
class GroupRollout:
    """Samples and scores groups of completions.

    Args:
        score_completions: returns the verdicts on completions.
        conversation: replies between turns; None if every completion has one turn.
        sampling: sampling parameters of groups that start from now on.
        candidates: completions that are sampled for a prompt.
        repeats: completions of a group; if fewer than the candidates, a balanced choice of them.
        seed: fixes, together with the group id, every random number of the sampling and of the choice.
        lowest_scores: lowest score of each data set; callers lower the scores of invalid completions by it.
        teacher: makes the teacher's prompt; None if the teacher sees the policy's prompt.
    """

    sampler: Sampler
    encoder: ChatEncoder
    score_completions: CompletionScorer
    conversation: Conversation | None
    sampling: Sampling
    candidates: int
    repeats: int
    seed: int
    lowest_scores: MinimumScores = field(default_factory=MinimumScores)
    teacher: TeacherPrompt | None = None

    async def run_group(self, example: Example, group_id: int, on_sampled: Callable[[], None] = lambda: None) -> Group:
        """Samples and scores one group.

        Args:
            group_id: chosen by the caller, in the order of sampling.
            on_sampled: called when the last token of the group is sampled.
        """
        started_at = time.time()
        request = self.make_request(self.encoder.encode(example), group_id)
        candidates = await self.generate(request)
        on_sampled()
        return await self.score_group(request, example, candidates, started_at)

    def make_request(self, prompt: tuple[int, ...], group_id: int) -> Request:
        """Returns the request of a group's first turn."""
        return Request(group_id, prompt, self.candidates, self.sampling, (self.seed << 40) + group_id)

    async def generate(self, request: Request) -> list[SampledCompletion]:
        """Samples the completions of a request, with all their turns."""
        completions = await self.sampler.generate(request)
        if self.conversation is not None:
            async with asyncio.TaskGroup() as turn_tasks:
                for row, one in enumerate(completions):
                    turn_tasks.create_task(self._run_turns(self.conversation, request, row, one))
        return completions

    async def _run_turns(
        self, conversation: Conversation, request: Request, row: int, completion: SampledCompletion
    ) -> None:
        """Extends a completion turn by turn.

        `max_tokens` bounds all turns together. A reply that leaves no room for a token ends the completion.
        """
        turn, last, completion.sampled_mask = 1, completion.token_ids, [True] * len(completion.token_ids)
        while completion.finish_reason == "stop":
            with self.sampler.outside_engine():
                reply = await conversation.reply(last, turn)
            if not reply:
                return
            if request.sampling.max_tokens - len(completion.token_ids) <= len(reply):
                completion.finish_reason = "length"
                return
            _append_tokens(completion, SampledCompletion(reply, [0.0] * len(reply), [], "stop"), is_sampled=False)
            # The prompt of a further turn is the whole sequence so far. Its seed depends on request, row and turn
            # only, not on what else is generated at the same time.
            room = request.sampling.max_tokens - len(completion.token_ids)
            digest = hashlib.blake2b(f"{request.seed}/{row}/{turn}".encode(), digest_size=8).digest()
            continuation = replace(
                request,
                prompt=(*request.prompt, *completion.token_ids),
                n=1,
                sampling=replace(request.sampling, max_tokens=room),
                seed=int.from_bytes(digest, "little") >> 1,
            )
            (next_turn,) = await self.sampler.generate(continuation)
            _append_tokens(completion, next_turn, is_sampled=True)
            turn, last, completion.finish_reason = turn + 1, next_turn.token_ids, next_turn.finish_reason
            completion.engine = next_turn.engine

    async def score_group(
        self, request: Request, example: Example, candidates: list[SampledCompletion], started_at: float
    ) -> Group:
        """Scores the sampled candidates of a request and builds their group.

        started_at: time at which the prompt was encoded, in seconds of `time.time()`.
        """
        sampled_at, prompt_text = time.time(), self.encoder.prompt_text(request.prompt)
        self.encoder.decode(candidates, answer_prefill(prompt_text, example.prefill))
        shown = [
            CompletionInRun(**vars(one.reward_input), token_ids=tuple(one.token_ids))
            for one in candidates
            if one.reward_input is not None
        ]
        verdicts = await self.score_completions(shown, [example] * len(shown))
        for one, verdict in zip(candidates, verdicts, strict=True):
            one.verdict = verdict
        pairs = list(zip(candidates, choose_balanced_candidates(verdicts, self.repeats, request.seed), strict=True))
        return Group(
            request.request_id,
            example,
            request.prompt,
            prompt_text,
            request.sampling,
            [one for one, chosen in pairs if chosen],
            GroupTimes(started_at, sampled_at, time.time()),
            [one for one, chosen in pairs if not chosen],
            teacher_prompt=self.teacher_prompt(example),
        )

    def teacher_prompt(self, example: Example) -> tuple[int, ...]:
        """Returns the token ids of the teacher's prompt, empty without a teacher."""
        return () if self.teacher is None else self.encoder.encode(self.teacher.teacher_example(example))


def choose_balanced_candidates(verdicts: Sequence[Verdict], repeats: int, seed: int) -> list[bool]:
    """Chooses `repeats` of a prompt's candidates, with right and wrong ones as balanced as possible.

    `seed` fixes the random choice among the right (or wrong) candidates. Candidates whose scoring failed come last.
    Returns for each candidate whether it is chosen.
    """
    chance = random.Random(seed)
    order = sorted(range(len(verdicts)), key=[chance.random() for _ in verdicts].__getitem__)
    right = [index for index in order if verdicts[index].has_score and verdicts[index].success > 0.5]
    wrong = [index for index in order if verdicts[index].has_score and verdicts[index].success <= 0.5]
    failed = [index for index in order if not verdicts[index].has_score]
    take_right = min(len(right), max(repeats - len(wrong), repeats // 2))
    take_wrong = min(len(wrong), repeats - take_right)
    chosen = {*right[:take_right], *wrong[:take_wrong], *failed[: repeats - take_right - take_wrong]}
    return [index in chosen for index in range(len(verdicts))]


def _append_tokens(completion: SampledCompletion, continuation: SampledCompletion, is_sampled: bool) -> None:
    """Appends tokens to a completion.

    Tokens of a reply get the policy version of the token before them.
    """
    completion.token_ids = completion.token_ids + continuation.token_ids
    completion.log_probs = completion.log_probs + continuation.log_probs
    versions = (
        continuation.policy_versions if is_sampled else completion.policy_versions[-1:] * len(continuation.token_ids)
    )
    completion.policy_versions = completion.policy_versions + versions
    completion.sampled_mask += [is_sampled] * len(continuation.token_ids)
